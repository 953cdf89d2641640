"""What an operator configures: the file, the environment's secrets, the flags; and what contradicts itself."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.builders import COST_MODEL
from tests.serve.real import tiny_model

from vertumnus.core.composition import Composition, Topology, lay_out
from vertumnus.core.pulls import PullSettings
from vertumnus.core.queueing import Discipline
from vertumnus.engine.model_config import ModelConfig
from vertumnus.errors import ConfigError
from vertumnus.serve.config import SECRETS, ServeConfig, config_from, read_config
from vertumnus.serve.rank_launch import check_fit, launch_file
from vertumnus.serve.router import Router

ROOT = Path(__file__).resolve().parents[2]
POOL_TOKEN = "pool-0123456789abcdef"
CONTROL_TOKEN = "control-0123456789abcdef"


def external(**changes):
    values = {
        "model": str(tiny_model.folder()),
        "launcher": "external",
        "pool_host": "127.0.0.1",
        "pool_port": 29600,
        "pool_token": POOL_TOKEN,
    }
    return config_from({**values, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pool_port": 0}, "pool_port is 0"),
        ({"pool_token": None}, "pool_token is missing"),
        ({"pool_host": "0.0.0.0"}, "pool_host is '0.0.0.0'"),
    ],
)
def test_what_external_ranks_could_not_find_is_refused(changes, named):
    external().checked()
    with pytest.raises(ConfigError, match=named):
        external(**changes).checked()


def test_the_papers_system_is_one_name_for_its_placement_queue_controller_and_copies():
    papers = external(policy="vertumnus-paper")
    assert (papers.queue, papers.controller, papers.pulls, papers.moves, papers.waits) == (
        "fifo",
        "threshold",
        "none",
        False,
        False,
    )
    assert external(policy="vertumnus-paper", controller="none", replication=False).controller == "none"
    with pytest.raises(ConfigError, match=r'queue is "shortest" with policy .vertumnus-paper.; accepted: "fifo"$'):
        external(policy="vertumnus-paper", queue="shortest")
    with pytest.raises(ValueError, match=r'pulls is "any" with policy .vertumnus-paper.; accepted: "none"'):
        ServeConfig(model="model", policy="vertumnus-paper", pulls="any")
    assert ServeConfig(model="model", policy="vertumnus-paper").queue == "fifo"
    with pytest.raises(ConfigError, match=r'accepted: "threshold", "none"$'):
        external(policy="vertumnus-paper", controller="lookahead")


def test_a_router_sets_its_control_plane_up_as_the_configuration_says_and_outlives_its_controller():
    router = Router(SimpleNamespace(config=external(policy="vertumnus-paper", controller="none", window_s=7.0)))
    layout = lay_out(Composition.parse("4x1"), Topology(4))
    plane = router._control_plane(layout, COST_MODEL, None, PullSettings(s_per_token=1e-6, latency_s=0.001), epoch=1)
    settings = plane.settings
    assert (settings.discipline, settings.pull, settings.moves, settings.waits) == (Discipline.FIFO, None, None, None)
    assert settings.window_s == 7.0
    assert settings.outlives_controller_faults


def test_what_is_wrong_is_said_without_secrets():
    with pytest.raises(ValueError, match="policy") as caught:
        ServeConfig(model="model", policy="vertumnus-paper", pulls="any", control_token="sesame-sesame-sesame")
    assert "sesame" not in str(caught.value)


def test_a_launch_file_is_for_external_ranks_and_holds_no_secret():
    launch = launch_file(external(api_keys={"sk-1": "team"}))
    assert json.loads(launch)["num_ranks"] == 5
    assert POOL_TOKEN not in launch
    with pytest.raises(ConfigError, match="launcher is 'local'"):
        launch_file(external(launcher="local"))


def test_a_rank_of_another_launch_is_told_apart():
    config, model = external(ranks=1, block_tokens=8), ModelConfig.from_folder(tiny_model.folder())
    launch = json.loads(launch_file(config))
    block_bytes = 2 * 2 * 2 * 16 * 4 * 8  # K and V of 2 layers, 2 heads of 16 in float32, 8 tokens

    def ranks(num_slots):
        hello = SimpleNamespace(num_slots=num_slots, block_tokens=8, block_bytes=block_bytes)
        return SimpleNamespace(roster=SimpleNamespace(hello=lambda rank: hello))

    check_fit(ranks(launch["num_slots"]), config, model)
    with pytest.raises(ConfigError, match="rank 0 has 7 blocks of 8 tokens"):
        check_fit(ranks(7), config, model)


def test_secrets_come_from_the_environment_over_the_file_and_are_never_shown(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(f'model = "somewhere"\ncontrol_token = "{"x" * 16}"\nport = 1\n', encoding="utf-8")
    environment = {
        "VERTUMNUS_POOL_TOKEN": POOL_TOKEN,
        "VERTUMNUS_CONTROL_TOKEN": f"{CONTROL_TOKEN}\n",
        "VERTUMNUS_API_KEYS": '{"sk-1": "team"}',
        "VERTUMNUS_PORT": "2",
    }
    config = read_config(file, {}, environment)
    assert (config.pool_token, config.control_token, config.api_keys) == (POOL_TOKEN, CONTROL_TOKEN, {"sk-1": "team"})
    assert config.port == 1
    assert not any(secret in config.to_toml() for secret in (POOL_TOKEN, CONTROL_TOKEN, "sk-1"))
    assert read_config(file, {"control_token": "y" * 16}, environment).control_token == "y" * 16


def test_a_wrong_secret_is_not_repeated(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('model = "somewhere"\n', encoding="utf-8")
    for variable, value in [
        ("API_KEYS", "sk-1=team"),
        ("API_KEYS", '["sk-1"]'),
        ("API_KEYS", '{"sk-1": 5}'),
        ("POOL_TOKEN", "sk-1"),
    ]:
        with pytest.raises(ConfigError, match=variable.lower() if value != "sk-1=team" else variable) as raised:
            read_config(file, {}, {f"VERTUMNUS_{variable}": value})
        assert "sk-1" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host", ""),
        ("api_keys", {"": "team"}),
        ("drain_timeout_s", float("inf")),
        ("start_timeout_s", float("inf")),
        ("window_s", float("nan")),
    ],
)
def test_what_no_server_could_mean_is_refused_before_ranks_load(key, value):
    with pytest.raises(ConfigError, match=key):
        config_from({"model": str(tiny_model.folder()), key: value}).checked()


def test_a_link_to_a_folder_names_the_model(tmp_path):
    link = tmp_path / "my-model"
    link.symlink_to(tiny_model.folder())
    assert config_from({"model": str(link)}).model_name == "my-model"
    assert config_from({"model": str(link / "..")}).model_name == tmp_path.name
    assert config_from({"model": str(link), "name": "other"}).model_name == "other"


def test_every_secret_is_a_key():
    assert set(SECRETS) <= set(ServeConfig.model_fields)


def test_a_composition_needs_degrees_of_the_profile():
    profile = str(ROOT / "benchmarks/results/profile-smollm2.toml")
    values = {"model": str(tiny_model.folder()), "ranks": 4, "profile": profile}
    assert config_from({**values, "composition": "2x2"}).checked()
    with pytest.raises(ConfigError, match=r"composition is 1x4; accepted: degrees of profile .* \(1, 2\)"):
        config_from({**values, "composition": "1x4"}).checked()
