"""The TTFT target of a request."""

import re
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vertumnus.errors import ConfigError

FloatArray = NDArray[np.float64]
Tokens = TypeVar("Tokens", float, FloatArray)


@dataclass(frozen=True, slots=True)
class Slo:
    """TTFT target of a request: tau = base_s + per_token_s * L."""

    base_s: float = 1.0
    per_token_s: float = 0.0002

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Reads `1.0+0.0002L` or `2.5`. Raises ConfigError for anything else."""
        number = r"\d+(?:\.\d*)?(?:e-?\d+)?"
        matched = re.fullmatch(rf"({number})(?:\+({number})L)?", text.replace(" ", ""))
        if matched is None:
            raise ConfigError(f"slo is {text!r}; accepted: seconds plus seconds per input token, such as 1.0+0.0002L")
        return cls(float(matched[1]), float(matched[2] or 0))

    def __str__(self) -> str:
        return f"{self.base_s:g}+{self.per_token_s:g}L"

    def tau_s(self, input_tokens: Tokens) -> Tokens:
        return self.base_s + self.per_token_s * input_tokens
