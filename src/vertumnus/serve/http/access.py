"""Who may do what: API keys for the models, the control token for /admin."""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

from vertumnus.serve.http.api_error import ApiError
from vertumnus.serve.http.config import HttpConfig
from vertumnus.serve.http.exchange import Exchange

__all__ = ["COOKIE_NAME", "Access", "Tenant"]

COOKIE_NAME = "vertumnus_dashboard"
SALT_PERSON = b"vertumnus-tenant"
"""Sets the salts apart from any other use of BLAKE2 on the same key."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """`salt` goes into the block hashes: who has another one can't find these blocks. `name` is for logs."""

    salt: bytes = b""
    name: str | None = None


EVERYBODY = Tenant()


class Access:
    """Secrets are compared by a keyed digest, so that the time it takes tells nothing about them."""

    def __init__(self, config: HttpConfig) -> None:
        self._digest_key = secrets.token_bytes(32)
        self._tenants = {
            self._digest(key.encode()): Tenant(
                hashlib.blake2b(key.encode(), digest_size=16, person=SALT_PERSON).digest(), name
            )
            for key, name in config.api_keys.items()
        }
        token = config.control_token
        self._control_digest = None if token is None else self._digest(token.encode())
        self.cookie = config.dashboard_cookie or secrets.token_urlsafe(32)
        """What a browser holds instead of the control token."""

    def tenant(self, exchange: Exchange) -> Tenant:
        """ApiError 401 without a valid key, where keys are asked for."""
        if not self._tenants:
            return EVERYBODY
        key = exchange.bearer
        if key is None:
            raise _unauthorised("an API key is needed: Authorization: Bearer <key>", "missing_api_key")
        tenant = self._tenants.get(self._digest(key))
        if tenant is None:
            raise _unauthorised("the API key is not valid", "invalid_api_key")
        return tenant

    def check_control(self, exchange: Exchange) -> None:
        """ApiError 401 without a token, 403 with a wrong one. Reading is also allowed to the dashboard's cookie:
        a page elsewhere can't act with it."""
        token = exchange.bearer
        if token is None:
            if exchange.method in ("GET", "HEAD") and self.has_cookie(exchange):
                return
            raise _unauthorised("the control token is needed: Authorization: Bearer <token>", "missing_control_token")
        if not self.is_control_token(token):
            raise ApiError(403, "the control token is not valid", "permission_error", code="invalid_control_token")

    def is_control_token(self, token: bytes) -> bool:
        return self._control_digest is not None and hmac.compare_digest(self._digest(token), self._control_digest)

    def has_cookie(self, exchange: Exchange) -> bool:
        try:
            cookies = SimpleCookie((exchange.header(b"cookie") or b"").decode("latin-1"))
        except CookieError:
            return False
        found = cookies.get(COOKIE_NAME)
        return (
            self._control_digest is not None
            and found is not None
            and hmac.compare_digest(found.value.encode(), self.cookie.encode())
        )

    def _digest(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, key=self._digest_key, digest_size=32).digest()


def _unauthorised(message: str, code: str) -> ApiError:
    return ApiError(401, message, "authentication_error", code=code, headers={"www-authenticate": "Bearer"})
