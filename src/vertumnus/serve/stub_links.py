"""The links between stub ranks: how long block copies take on a profile's hardware, as the simulator has it.

Inside a node each rank has its own links, between nodes all ranks of a node share; a copy waits for its turn on both
ends. A handoff to a decode rank takes T_ext, the decode rank's first step included, and waits for nobody.
"""

from vertumnus.core.composition import Topology
from vertumnus.core.profile import Profile


class StubLinks:
    """Between prefill ranks 0 .. topology.num_gpus - 1, and from them to whatever ranks follow."""

    def __init__(self, profile: Profile, topology: Topology, *, block_tokens: int) -> None:
        self._profile = profile
        self._topology = topology
        self._block_bytes = block_tokens * profile.kv_bytes_per_token
        self._free_s: dict[object, float] = {}
        self._handoffs: dict[int, tuple[float, float]] = {}
        """By decode rank: when it was sent blocks last, and how many bytes of them."""

    def end_s(self, now_s: float, source: int, destination: int, num_blocks: int) -> float:
        """When a copy that begins now, or when its links are free, will be done.

        What goes to one decode rank at one instant is one prompt's, from several ranks: the last of it ends when all
        has arrived.
        """
        profile = self._profile
        num_bytes = float(num_blocks * self._block_bytes)
        if destination >= self._topology.num_gpus:
            since_s, sent_bytes = self._handoffs.get(destination, (now_s, 0.0))
            num_bytes += sent_bytes if since_s == now_s else 0.0
            self._handoffs[destination] = (now_s, num_bytes)
            return now_s + profile.decode_latency_s + num_bytes / profile.decode_bytes_per_s + profile.first_token_s
        nodes = self._topology.node_of(source), self._topology.node_of(destination)
        links: tuple[object, ...]
        if nodes[0] == nodes[1]:
            links = (("rank out", source), ("rank in", destination))
            duration_s = num_bytes / profile.intra_node_bytes_per_s
        else:
            links = (("node out", nodes[0]), ("node in", nodes[1]))
            duration_s = num_bytes / profile.inter_node_bytes_per_s
        end_s = max([now_s, *(self._free_s.get(link, 0.0) for link in links)]) + profile.copy_latency_s + duration_s
        for link in links:
            self._free_s[link] = end_s
        return end_s
