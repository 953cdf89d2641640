"""The page about the API names what there is."""

import ast
import dataclasses
from pathlib import Path

from tests.serve.http.fake_backend import FakeBackend
from tests.serve.http.servers import http_config, tokeniser

import vertumnus.serve.http
from vertumnus.serve.http import HttpConfig, create_app

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "serving-api.md").read_text(encoding="utf-8")


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
