"""The page about the API names what there is."""

import ast
import dataclasses
import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit

from tests.serve.http.fake_backend import FakeBackend
from tests.serve.http.servers import http_config, serving, tokeniser

import vertumnus.serve.http
from vertumnus.serve.http import HttpConfig, create_app

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "serving-api.md").read_text(encoding="utf-8")


def test_every_path_is_on_the_page():
    for path in create_app(FakeBackend(), tokeniser(), http_config()).api.openapi()["paths"]:
        assert path in PAGE, path


def test_every_error_code_is_on_the_page():
    codes = set()
    for module in Path(vertumnus.serve.http.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
                codes.add(node.value.value)
    assert len(codes) > 12
    assert [code for code in codes if f"`{code}`" not in PAGE] == []


def test_every_limit_is_on_the_page():
    limits = [field.name for field in dataclasses.fields(HttpConfig) if field.name.startswith("max_")]
    limits += [field.name for field in dataclasses.fields(HttpConfig) if field.name.endswith("_s")]
    limits.remove("max_context_tokens")  # the model's, no limit of ours
    assert [name for name in limits if f"`{name}`" not in PAGE] == []


def test_every_curl_command_does_what_it_is_shown_for():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in pages]
    commands = [line for text in texts for line in re.findall(r"\bcurl [^`\n]*", text)]
    assert len(commands) >= 3
    with serving(control_token="control-secret") as server:
        for command in commands:
            words = shlex.split(command.replace("$TOKEN", "control-secret"))
            options = [(words[n], words[n + 1]) for n in range(len(words) - 1)]
            headers = dict(value.split(": ", 1) for name, value in options if name == "-H")
            [body] = [value for name, value in options if name == "-d"]
            url = words[1] if "//" in words[1] else f"http://{words[1]}"
            # What curl says of a body unless it is told otherwise.
            unasked = {"content-type": "application/x-www-form-urlencoded"}
            headers = unasked | {name.lower(): value for name, value in headers.items()}
            status, _, answer = server.request("POST", urlsplit(url).path, body.encode(), headers)
            assert status == 200, (command, answer)
