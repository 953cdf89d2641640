"""What a live pool adds to the time that its ranks and links take, as parameters of a simulation."""

from dataclasses import asdict, dataclass

from vertumnus.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOverheads:
    """Seconds beyond E_C and T_ext, all 0 or more. The profile is of the hardware; these are of the program around it.

    request_s, request_s_per_token: from a client's sending until the request is placed, whatever its length and for
    each of its input tokens. step_s: by how much each step takes longer than E_C, until the next one can start.
    handover_s: from the last step's end until the client has the first token, beyond T_ext.

    A control plane knows nothing of them: its predictions are E_C, as those of a live one are.
    """

    request_s: float = 0.0
    request_s_per_token: float = 0.0
    step_s: float = 0.0
    handover_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: a finite number, 0 or more")

    def placed_after_s(self, input_tokens: int) -> float:
        """From sending such a prompt until it is placed."""
        return self.request_s + self.request_s_per_token * input_tokens

    def to_json(self) -> dict[str, float]:
        return asdict(self)
