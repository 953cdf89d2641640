"""Profiles: every number has its provenance, a file reads back as it was written, bad files are named."""

import dataclasses
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vertumnus
from vertumnus.core.cost import Coefficients
from vertumnus.core.profile import (
    BUILT_IN,
    DEFAULT_PROFILE,
    Profile,
    Provenance,
    Source,
    format_profile,
    load_profile,
    parse_profile,
    write_profile,
)
from vertumnus.errors import ConfigError

FILES = Path(vertumnus.__file__).parent / "profiles"
COEFFICIENT_KEYS = ("d_s", "a_s_per_token", "b_s_per_token", "c_s_per_token", "alpha_s_per_pair")

times = st.floats(0, 1e6)
rates = st.floats(1e-3, 1e15)
counts = st.integers(1, 10**12)
texts = st.text(min_size=1, max_size=20)
provenances = st.builds(Provenance, source=st.sampled_from(Source), note=st.text(max_size=20))


@st.composite
def profiles(draw):
    degrees = tuple(sorted(draw(st.sets(st.sampled_from([1, 2, 4, 8, 16]), min_size=1))))
    uniform = draw(st.booleans())
    coefficients = st.builds(Coefficients, d=times, a=times, b=times, c=times, alpha=times)
    values = {
        "kv_bytes_per_token": draw(counts),
        "kv_capacity_tokens_per_gpu": draw(counts),
        "intra_node_bytes_per_s": draw(rates),
        "inter_node_bytes_per_s": draw(rates),
        "decode_bytes_per_s": draw(rates),
        "copy_latency_s": draw(times),
        "decode_latency_s": draw(times),
        "first_token_s": draw(times),
        "switch_s": draw(times),
    }
    if draw(st.booleans()):
        values["max_sequence_tokens"] = draw(counts)
    kappa = {degree: draw(rates) for degree in degrees} if draw(st.booleans()) else None
    keys = list(values)
    tables = ["coefficients"] if uniform else [f"coefficients.{degree}" for degree in degrees]
    keys += [f"{table}.{key}" for table in tables for key in COEFFICIENT_KEYS]
    keys += [f"kappa.{degree}" for degree in kappa or ()]
    shared = draw(coefficients)
    return Profile(
        name=draw(texts),
        model=draw(texts),
        hardware=draw(texts),
        note=draw(st.text(max_size=20)),
        degrees=degrees,
        coefficients={degree: shared if uniform else draw(coefficients) for degree in degrees},
        kappa=kappa,
        provenance={key: draw(provenances) for key in keys},
        **values,
    )


@given(profiles())
def test_profile_reads_back_as_it_was_written(profile):
    text = format_profile(profile)
    again = parse_profile(text, origin="written")
    assert again == profile
    assert format_profile(again) == text


@given(profiles())
def test_cost_model_has_the_coefficients_of_the_profile(profile):
    model = profile.cost_model()
    assert model.degrees == profile.degrees
    assert model.coefficients == dict(profile.coefficients)


def test_built_in_names_are_the_shipped_files():
    assert {f"{name}.toml" for name in BUILT_IN} == {file.name for file in FILES.iterdir()}
    assert load_profile() == load_profile(DEFAULT_PROFILE)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_profile_is_canonical_and_labelled_estimated(name):
    profile = load_profile(name)
    assert profile.name == name
    assert format_profile(profile) == (FILES / f"{name}.toml").read_text(encoding="utf-8")
    assert all(profile.provenance[f"coefficients.{key}"].source is Source.ESTIMATED for key in COEFFICIENT_KEYS)
    assert all(provenance.note for provenance in profile.provenance.values())
    assert load_profile(FILES / f"{name}.toml") == profile


def test_profile_crosses_process_borders():
    profile = load_profile()
    assert pickle.loads(pickle.dumps(profile)) == profile


def test_default_profile_has_the_papers_speed_ups_at_64k_tokens():
    """Published: 2.71x with four ranks, 3.91x with eight."""
    model = load_profile(DEFAULT_PROFILE).cost_model()
    alone_s, four_s, eight_s = (model.prefill_s(65536, 0, degree) for degree in (1, 4, 8))
    assert alone_s / four_s == pytest.approx(2.71, rel=0.03)
    assert alone_s / eight_s == pytest.approx(3.91, rel=0.03)


@pytest.mark.parametrize(
    ("tokens", "linear_ms", "attention_layer_ms"),
    [(1024, 71, 0.110), (4096, 200, 1.122), (8192, 370, 4.318), (16384, 711, 16.67), (32768, 1394, 63.03)],
)
def test_default_profile_meets_the_published_kernel_times(tokens, linear_ms, attention_layer_ms):
    """The sums of docs/profiles.md, step 1: GEMMs and experts, 48 attention layers, and the rest by the token."""
    summed_s = (linear_ms + 48 * attention_layer_ms) / 1000 + 3.7e-6 * tokens
    assert load_profile(DEFAULT_PROFILE).cost_model().prefill_s(tokens, 0, 1) == pytest.approx(summed_s, rel=0.015)


@pytest.mark.parametrize(
    ("name", "gpu_bytes", "tokens"), [(BUILT_IN[0], 143_771 * 2**20, 708_096), (BUILT_IN[1], 81_559 * 2**20, 110_592)]
)
def test_kv_capacity_follows_from_memory(name, gpu_bytes, tokens):
    profile = load_profile(name)
    assert profile.kv_bytes_per_token == 2 * 4 * 128 * 2 * 48
    free_bytes = 0.9 * gpu_bytes - 61.06e9 - 5e9
    assert profile.kv_capacity_tokens_per_gpu == tokens == pytest.approx(free_bytes / 98_304, rel=0.005)
    assert profile.kv_capacity_blocks(512) * 512 == tokens


def changed(old, new):
    text = (FILES / f"{DEFAULT_PROFILE}.toml").read_text(encoding="utf-8")
    assert text.count(old) >= 1, old
    return text.replace(old, new, 1)


BAD_FILES = {
    "syntax": (changed("degrees = [", "degrees = "), "not TOML"),
    "unknown key": (changed("switch_s", "swich_s"), "the profile has the unknown key 'swich_s'; accepted: name, model"),
    "missing key": (changed("switch_s = ", "# "), "the profile lacks the key 'switch_s'"),
    "unknown coefficient": (changed("d_s = {", "d_ms = {"), "coefficients has the unknown key 'd_ms'"),
    "missing coefficient": (changed("d_s = {", "# "), "coefficients lacks the key 'd_s'"),
    "bare number": (changed("switch_s = {", "switch_s = 1 #"), "switch_s is 1; accepted: a table with the keys value"),
    "key of a number": (changed("value = 0.8", "values = 0.8"), "switch_s has the unknown key 'values'"),
    "negative": (changed("value = 0.8", "value = -0.8"), "switch_s is -0.8; accepted: a finite number >= 0"),
    "negative coefficient": (changed("value = 0.028", "value = -1"), "coefficients.d_s is -1; accepted"),
    "not a number": (changed("value = 0.8", "value = nan"), "switch_s is nan; accepted"),
    "zero rate": (
        changed("value = 2.29e+11", "value = 0"),
        "intra_node_bytes_per_s is 0; accepted: a finite number > 0",
    ),
    "text for a number": (changed("value = 0.8", 'value = "0.8"'), "switch_s is '0.8'; accepted"),
    "truth for a number": (changed("value = 0.8", "value = true"), "switch_s is True; accepted"),
    "fraction for a count": (changed("98304", "98304.5"), "kv_bytes_per_token is 98304.5; accepted: a whole number"),
    "source": (
        changed('value = 0.8, source = "estimated"', 'value = 0.8, source = "guessed"'),
        "switch_s.source is 'guessed'; accepted: measured, published, estimated",
    ),
    "source of another type": (
        changed('value = 0.8, source = "estimated"', "value = 0.8, source = []"),
        "switch_s.source is \\[\\]; accepted",
    ),
    "no source": (changed('0.8, source = "estimated"', "0.8"), "switch_s lacks the key 'source'"),
    "note": (changed('0.028, source = "estimated", note = "', '0.028, source = "estimated", note = 1}#'), "note is 1"),
    "no degrees": (changed("[1, 2, 4, 8]", "[]"), r"degrees is \[\]; accepted: rising powers of two"),
    "degree 3": (changed("[1, 2, 4, 8]", "[1, 3]"), r"degrees is \[1, 3\]; accepted: rising powers of two"),
    "text in degrees": (changed("[1, 2, 4, 8]", "[1, 'two']"), r"degrees is \[1, 'two'\]; accepted"),
    "degrees no list": (changed("[1, 2, 4, 8]", "8"), "degrees is 8; accepted: a list"),
    "number for a name": (changed('name = "qwen3', 'name = 1 # "'), "name is 1; accepted: text"),
    "empty name": (changed('name = "qwen3', 'name = "" # "'), "name is empty"),
    "coefficients no table": (changed("[coefficients]", "[[coefficients]]"), "coefficients is"),
    "kappa of a missing degree": (
        changed("[kappa]\n1 =", "[kappa]\n16 ="),
        "kappa has the unknown key '16'",
    ),
    "coefficients of a degree": (
        changed("[coefficients]", "[coefficients.16]"),
        "coefficients has the unknown key '16'; accepted: 1, 2, 4, 8",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file_is_named_with_field_and_value(text, message, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_profile(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "make", [lambda path: path.write_bytes(b"\xff\xfe"), lambda path: path.mkdir(), lambda path: None]
)
def test_file_that_cannot_be_read_is_named_with_the_known_profiles(make, tmp_path):
    path = tmp_path / "mine.toml"
    make(path)
    with pytest.raises(ConfigError, match=f"mine.toml.*accepted: a TOML file, or one of {', '.join(BUILT_IN)}"):
        load_profile(path)


def test_existing_file_is_replaced_by_force_only(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"mine.toml', which exists; accepted: a new path, or --force"):
        write_profile(load_profile(), path)
    assert path.read_text() == "precious"
    write_profile(load_profile(), path, force=True)
    assert load_profile(path) == load_profile()
    assert list(tmp_path.iterdir()) == [path]


def test_profile_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match="accepted: a path that can be written"):
        write_profile(load_profile(), tmp_path / "missing" / "mine.toml")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"provenance": {}}, "has a value but no provenance"),
        ({"kappa": None}, "kappa.1 has a provenance but no value"),
        ({"kappa": {1: 0.9}}, r"kappa has the degrees \[1\]; accepted: one entry for each of \[1, 2, 4, 8\]"),
        ({"degrees": (1, 2)}, r"coefficients has the degrees \[1, 2, 4, 8\]; accepted"),
        ({"switch_s": -1.0}, r"switch_s is -1.0; accepted"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token is 0; accepted: a whole number from 1"),
    ],
)
def test_profile_made_in_code_is_checked_too(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(load_profile(), **change)


def test_kappa_is_set_and_replaced_with_its_provenance():
    first = load_profile().with_kappa(dict.fromkeys((1, 2, 4, 8), 0.7), Provenance(Source.ESTIMATED))
    second = first.with_kappa(dict.fromkeys((1, 2, 4, 8), 0.8), Provenance(Source.MEASURED, "load ramp"))
    assert parse_profile(format_profile(second), origin="written") == second
    assert second.kappa == dict.fromkeys((1, 2, 4, 8), 0.8)
    assert second.provenance["kappa.8"] == Provenance(Source.MEASURED, "load ramp")


def test_different_coefficients_need_a_provenance_each():
    profile = load_profile()
    slower = dataclasses.replace(profile.coefficients[8], d=0.05)
    with pytest.raises(ConfigError, match="coefficients differ by degree under one provenance"):
        dataclasses.replace(profile, coefficients={**profile.coefficients, 8: slower})


@pytest.mark.parametrize("block_tokens", [0, 10**9])
def test_block_that_no_gpu_holds_is_refused(block_tokens):
    with pytest.raises(ConfigError, match=f"block_tokens is {block_tokens}; accepted: 1 to 708096"):
        load_profile().kv_capacity_blocks(block_tokens)
