"""A placement policy of one's own, compared with Vertumnus' and two baselines on a synthesised conversation.

Run: python examples/own_policy.py
"""

from vertumnus import (
    Composition,
    Placement,
    PlacementView,
    SimulationSettings,
    choose,
    load_profile,
    simulate,
    synthesise,
)


class GreenestPolicy:
    """Fewest GPU seconds, as long as the predicted TTFT stays within the request's target; else least TTFT."""

    name = "greenest"

    def place(self, view: PlacementView) -> Placement:
        ttft_s = view.wait_s + view.service_s
        target_s = 1.0 + 0.0002 * view.input_tokens
        in_time = ttft_s <= target_s
        if not in_time.any():
            return choose(view, ttft_s, "nobody is in time: least predicted TTFT")
        gpu_seconds = view.degrees * view.service_s
        gpu_seconds[~in_time] = float("inf")
        return choose(view, gpu_seconds, "fewest GPU seconds in time")


def main() -> None:
    trace = synthesise("conversation", seed=0).limited(1500).rescaled(15)
    settings = SimulationSettings(composition=Composition.parse("8x2,4x4,1x8"), is_fixed=True, has_replication=False)
    for policy in (GreenestPolicy(), "min-ttft", "round-robin", "vertumnus"):
        latency = simulate(trace, load_profile(), policy, settings).latency
        name = policy if isinstance(policy, str) else policy.name
        print(f"{name:12} mean TTFT {latency.mean_ttft_s:6.2f} s   SLO attainment {latency.slo_attainment_ratio:.1%}")


if __name__ == "__main__":
    main()
