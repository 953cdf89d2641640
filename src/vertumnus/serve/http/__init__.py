"""The HTTP front end of the live pool: OpenAI's API, probes and the operator's endpoints.

tokeniser = Tokeniser.from_folder(folder)
app = create_app(pool, tokeniser, config)
await serve_http(app, sockets, config, stop)
"""

from vertumnus.serve.http.app import HttpApp, create_app
from vertumnus.serve.http.backend import Backend
from vertumnus.serve.http.config import HttpConfig
from vertumnus.serve.http.server import serve_http, stop_on_signals
from vertumnus.serve.http.tokeniser import Tokeniser

__all__ = ["Backend", "HttpApp", "HttpConfig", "Tokeniser", "create_app", "serve_http", "stop_on_signals"]
