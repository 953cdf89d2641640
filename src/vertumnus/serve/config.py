"""What an operator decides about a live pool: one validated file, and flags over it."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vertumnus.core.composition import Composition, Topology, lay_out
from vertumnus.core.policies import PAPER_SETTINGS, PAPER_SYSTEM
from vertumnus.core.profile import load_profile
from vertumnus.core.slo import Slo
from vertumnus.engine.model_config import ModelConfig
from vertumnus.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SECRETS = ("control_token", "api_keys", "pool_token")
"""Keys that may also come from the environment, in VERTUMNUS_CONTROL_TOKEN and so on; `api_keys` there is JSON."""


class ServeConfig(BaseModel):
    """Every key may stand in the file (TOML) under its name; unknown ones are refused. Durations in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _as_in_paper(cls, values: Any) -> Any:
        """With all that the name of the paper's system stands for; its controller alone may be off."""
        if not isinstance(values, Mapping) or values.get("policy") != PAPER_SYSTEM:
            return values
        papers = PAPER_SETTINGS._asdict()
        for key, value in papers.items():
            accepted = (value, "none") if key == "controller" else (value,)
            if values.get(key, value) not in accepted:
                known = ", ".join(map(_toml, accepted))
                raise ConfigError(f"{key} is {_toml(values[key])} with policy {PAPER_SYSTEM!r}; accepted: {known}")
        return papers | dict(values)

    model: Path
    """Folder of the model, as Hugging Face writes it."""
    name: str | None = None
    """What clients call the model; None: the folder's name."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of weights and KV; None: the checkpoint's own."""

    ranks: int = Field(4, ge=1)
    """Prefill ranks."""
    decode_ranks: int = Field(1, ge=1)
    composition: str = "auto"
    """COUNTxDEGREE parts; auto: one worker of degree 2 for every two of degree 1, and the controller from there."""
    threads_per_rank: int = Field(1, ge=1)
    block_tokens: int = Field(32, ge=1)
    kv_mib_per_rank: int = Field(512, ge=1)
    """Memory for KV blocks."""

    launcher: Literal["local", "external"] = "local"
    """Who starts the ranks: the server on its own host, or somebody else (torchrun), on one host or several."""
    pool_host: str = "127.0.0.1"
    """Where the server listens for ranks, and where they reach it: an address or name of this host."""
    pool_port: int = Field(0, ge=0, le=65535)
    """0: any; with external ranks they must know it."""
    pool_token: str | None = Field(None, min_length=16)
    """What ranks show to be let in; None: made up at start."""
    start_timeout_s: float = Field(300.0, gt=0)
    """How long ranks may take to load and to come; external ones wait as long for the server, too."""

    profile: str = "auto"
    """A profile's name or file; auto: measured at start, in some ten seconds."""
    policy: str = "vertumnus"
    """Of placement; `vertumnus-paper` sets queue, controller, pulls, moves and waits too, as the paper has them."""
    controller: Literal["lookahead", "threshold", "none"] = "lookahead"
    window_s: float = Field(20.0, ge=0.1)
    """Observation window of the controller."""
    queue: Literal["fifo", "shortest"] = "shortest"
    step_tokens: int = Field(512, ge=1)
    """Token budget of a prefill step: longer prompts are cut, shorter ones packed where that is the less waiting."""
    replication: bool = True
    min_relief_s: float = Field(0.0, ge=0)
    """By how much shorter the queue at a further replica of a prefix must be than at every holder."""
    spares_last_copies: bool = False
    """Whether blocks that other workers hold are evicted before older ones that nobody else does."""
    pulls: Literal["none", "pending", "any"] = "any"
    """Which blocks of other workers a request may have copied in before it is served."""
    refit: bool = False
    """Whether the cost model follows what steps really take, within a factor of two of the profile."""
    moves: bool = True
    """Whether queued work moves to workers that run dry."""
    waits: bool = True
    """Whether a request may wait for a prefix that another is computing, instead of computing it too."""
    slo: str = "1.0+0.0002L"

    max_queued_requests: int = Field(1024, ge=1)
    max_wait_s: float | None = Field(None, gt=0)
    max_decode_sequences: int = Field(64, ge=1)

    host: str = Field("127.0.0.1", min_length=1)
    """An empty one would mean every address, as from a variable that is not set."""
    port: int = Field(8000, ge=0, le=65535)
    control_token: str | None = Field(None, min_length=16)
    """For /admin and the dashboard; None: made up at start and printed."""
    api_keys: dict[str, str] = Field(default_factory=dict)
    """Key to tenant's name; none: everybody is served, as one tenant."""
    public_metrics: bool = True
    max_connections: int = Field(4096, ge=1)
    max_body_mib: int | None = Field(None, ge=1)
    drain_timeout_s: float = Field(60.0, ge=0)
    max_router_deaths: int = Field(5, ge=0)
    """Within a minute; a router that dies more often is not started again, and the server ends."""

    def checked(self) -> "ServeConfig":
        """Itself; ConfigError for what contradicts itself or is not there, as far as that is known without a start."""
        if not self.model.is_dir():
            raise ConfigError(f"model is {str(self.model)!r}, which is no folder; accepted: a model's folder")
        if self.pool_host in ("0.0.0.0", "::", "*", ""):
            raise ConfigError(
                f"pool_host is {self.pool_host!r}; accepted: one address of this host, which ranks can reach"
            )
        if self.launcher == "external" and not self.pool_port:
            raise ConfigError("pool_port is 0; accepted: with launcher 'external' the port that ranks are told")
        if self.launcher == "external" and self.pool_token is None:
            raise ConfigError(
                "pool_token is missing; accepted: with launcher 'external' one of 16 characters or more, in the file "
                "or in VERTUMNUS_POOL_TOKEN, the same as the ranks'"
            )
        ModelConfig.from_folder(self.model)
        for pattern in ("tokenizer.json", "*.safetensors"):
            if next(self.model.glob(pattern), None) is None:
                raise ConfigError(
                    f"model is {str(self.model)!r}, without {pattern}; accepted: a complete model's folder"
                )
        most_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (self.ranks + self.decode_ranks) >> 20
        if self.launcher == "local" and self.kv_mib_per_rank > most_mib:
            raise ConfigError(
                f"kv_mib_per_rank is {self.kv_mib_per_rank}, for {self.ranks + self.decode_ranks} ranks; accepted: at "
                f"most {most_mib}, by this machine's memory"
            )
        if self.step_tokens < self.block_tokens:
            raise ConfigError(f"step_tokens is {self.step_tokens}; accepted: at least one block ({self.block_tokens})")
        composition = self.initial_composition
        if composition.num_gpus != self.ranks:
            raise ConfigError(f"composition is {composition}, of {composition.num_gpus} ranks; accepted: {self.ranks}")
        lay_out(composition, Topology(self.ranks))
        if self.profile != "auto":
            known = load_profile(self.profile).degrees
            if set(composition.degrees) - set(known):
                shown = ", ".join(map(str, known))
                raise ConfigError(
                    f"composition is {composition}; accepted: degrees of profile {self.profile} ({shown})"
                )
        Slo.parse(self.slo)
        if "" in self.api_keys:
            raise ConfigError("api_keys has an empty key; accepted: secrets only")
        return self

    @property
    def model_name(self) -> str:
        return self.name or Path(os.path.abspath(self.model)).name  # a link's own name, not its target's

    @property
    def initial_composition(self) -> Composition:
        if self.composition != "auto":
            return Composition.parse(self.composition)
        num_pairs = self.ranks // 4
        num_single = self.ranks - 2 * num_pairs
        return Composition.parse(f"{num_pairs}x2,{num_single}x1" if num_pairs else f"{num_single}x1")

    def to_toml(self) -> str:
        """What is in force, secrets left out."""
        lines = []
        for key, value in self.model_dump(mode="json").items():
            if value is None or key in SECRETS:
                lines.append(f"# {key} = {'(secret)' if value else '(default)'}")
            else:
                lines.append(f"{key} = {_toml(value)}")
        return "\n".join(lines) + "\n"


def read_config(file: Path | None, flags: dict[str, Any], environment: Mapping[str, str] | None = None) -> ServeConfig:
    """The file's keys, the environment's secrets over them, and over both the flags that were given. Raises
    ConfigError, naming the key."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"config {file} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"config {file} is not TOML: {error}") from error
    values |= _secrets_in(environment or {})
    values |= {key: value for key, value in flags.items() if value is not None}
    return config_from(values)


def _secrets_in(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in SECRETS:
        variable = f"VERTUMNUS_{key.upper()}"
        text = environment.get(variable, "").strip()
        if not text:
            continue
        if key != "api_keys":
            found[key] = text
            continue
        try:
            found[key] = json.loads(text)
        except ValueError:
            raise ConfigError(f"{variable} is not JSON; accepted: an object of keys and tenants' names") from None
    return found


def config_from(values: dict[str, Any]) -> ServeConfig:
    """Raises ConfigError with one sentence on the first key that is wrong."""
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # of keys that contradict each other
            raise first["ctx"]["error"] from None
        # Of a secret's parts, names too may be secrets.
        key = ".".join(map(str, first["loc"][:1] if first["loc"][0] in SECRETS else first["loc"]))
        if first["type"] == "extra_forbidden":
            known = ", ".join(ServeConfig.model_fields)
            raise ConfigError(f"key {key!r} is unknown; accepted: {known}") from None
        if first["type"] == "missing":
            raise ConfigError(f"{key} is missing; accepted: a value for it") from None
        shown = "(secret)" if key in SECRETS else repr(first["input"])
        raise ConfigError(f"{key} is {shown}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)
