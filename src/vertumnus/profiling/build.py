"""From measured times to a profile, every number with where it comes from."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from vertumnus.core.cost import Coefficients
from vertumnus.core.fit import PrefillSample
from vertumnus.core.fit_choice import Choice, Form
from vertumnus.core.profile import Profile, Provenance, Source
from vertumnus.profiling.copies import Way
from vertumnus.profiling.grid import BLOCK_TOKENS
from vertumnus.profiling.measure import Measured

__all__ = ["measured_now", "profile_of_measured", "profile_of_samples"]

_COEFFICIENT_KEYS = {
    "d": "d_s",
    "a": "a_s_per_token",
    "b": "b_s_per_token",
    "c": "c_s_per_token",
    "alpha": "alpha_s_per_pair",
}

_LINK_KEYS = (
    "intra_node_bytes_per_s",
    "inter_node_bytes_per_s",
    "copy_latency_s",
    "decode_bytes_per_s",
    "decode_latency_s",
    "switch_s",
)
"""What takes more than one device to measure."""


def measured_now(hardware: str) -> Provenance:
    """Measured here and today, by these versions."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "vertumnus"))
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return Provenance(Source.MEASURED, f"{hardware}, {versions}, Python {platform.python_version()}, {today}")


def _with_coefficients(
    profile: Profile, coefficients: Mapping[int, Coefficients], form: Form, provenance: Provenance
) -> Profile:
    """The profile with other coefficients and degrees. kappa, which rests on the old ones, is left out."""
    others = {
        key: known for key, known in profile.provenance.items() if not key.startswith(("coefficients.", "kappa."))
    }
    tables = ["coefficients"] if form is Form.UNIFORM else [f"coefficients.{degree}" for degree in coefficients]
    ours = {f"{table}.{key}": provenance for table in tables for key in _COEFFICIENT_KEYS.values()}
    return replace(
        profile,
        degrees=tuple(sorted(coefficients)),
        coefficients=dict(coefficients),
        kappa=None,
        provenance=others | ours,
    )


def profile_of_samples(base: Profile, choice: Choice, samples: Sequence[PrefillSample], *, name: str) -> Profile:
    """A base profile with the coefficients of somebody's samples; all else is the base's, and says so."""
    chosen = choice.chosen
    provenance = Provenance(
        Source.MEASURED,
        f"{len(samples)} samples given, fitted as {chosen.form.value}, "
        f"mean error {chosen.fit.mean_error_ratio:.1%}, held out {chosen.held_out_error_ratio:.1%}",
    )
    profile = _with_coefficients(base, chosen.fit.coefficients, chosen.form, provenance)
    note = f"Coefficients from samples; everything else from {base.name}."
    return replace(profile, name=name, note=note)


def profile_of_measured(
    measured: Measured,
    choice: Choice,
    *,
    name: str,
    model: str,
    hardware: str,
    kv_bytes_per_token: int,
    kv_capacity_tokens: int,
    max_sequence_tokens: int,
    base: Profile | None = None,
) -> Profile:
    """Everything that was measured here; what one host cannot tell is carried over, and says so. Where one device was
    measured alone, links and the switch are those of `base`."""
    here = measured_now(hardware)
    chosen = choice.chosen
    form = (
        f"{len(measured.samples)} samples, {chosen.form.value}, mean error {chosen.fit.mean_error_ratio:.1%}, "
        f"held out {chosen.held_out_error_ratio:.1%}; {here.note}"
    )
    of_model = Provenance(Source.PUBLISHED, "from the model's config.json")
    sources = {
        "kv_bytes_per_token": of_model,
        "kv_capacity_tokens_per_gpu": Provenance(Source.ESTIMATED, "what the memory given to KV blocks holds"),
        "max_sequence_tokens": of_model,
        "first_token_s": Provenance(Source.ESTIMATED, "the prefill step samples it; it waits for the hand-over only"),
    }
    links: dict[str, Any]
    if measured.copies:
        links, of_links = _measured_links(measured, kv_bytes_per_token, here)
    else:
        assert base is not None
        given = base.provenance
        links = {key: getattr(base, key) for key in _LINK_KEYS}
        of_links = {key: Provenance(given[key].source, f"{base.name}: {given[key].note}") for key in _LINK_KEYS}
    tables = ["coefficients"] if chosen.form is Form.UNIFORM else [f"coefficients.{c}" for c in chosen.fit.coefficients]
    fitted = {
        f"{table}.{key}": Provenance(Source.MEASURED, form) for table in tables for key in _COEFFICIENT_KEYS.values()
    }
    return Profile(
        name=name,
        model=model,
        hardware=hardware,
        note="Measured by `vertumnus profile`.",
        degrees=tuple(sorted(chosen.fit.coefficients)),
        coefficients=dict(chosen.fit.coefficients),
        kv_bytes_per_token=kv_bytes_per_token,
        kv_capacity_tokens_per_gpu=kv_capacity_tokens,
        max_sequence_tokens=max_sequence_tokens,
        first_token_s=0.0,
        provenance=sources | of_links | fitted,
        **links,
    )


def _measured_links(
    measured: Measured, kv_bytes_per_token: int, here: Provenance
) -> tuple[dict[str, Any], dict[str, Provenance]]:
    """Rates, latencies and the switch, and where they come from."""
    bytes_per_s = {
        way: BLOCK_TOKENS * kv_bytes_per_token / max(line.s_per_block, 1e-9) for way, line in measured.copies.items()
    }
    links = {
        "intra_node_bytes_per_s": bytes_per_s[Way.INSIDE],
        "inter_node_bytes_per_s": bytes_per_s[Way.TCP],
        "copy_latency_s": measured.copies[Way.INSIDE].latency_s,
        "decode_bytes_per_s": bytes_per_s[Way.DECODE],
        "decode_latency_s": measured.copies[Way.DECODE].latency_s,
        "switch_s": measured.switch_s,
    }
    over_tcp = Provenance(Source.ESTIMATED, f"over TCP inside one host, no second was at hand; {here.note}")
    return links, dict.fromkeys(_LINK_KEYS, here) | {"inter_node_bytes_per_s": over_tcp}
