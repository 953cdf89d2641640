"""What a live pool holds at an instant: everything of which nothing may be left once no request is open."""

import asyncio
import os
from typing import Any

from vertumnus.serve.live_pool import LivePool

__all__ = ["held"]


def held(pool: LivePool) -> dict[str, Any]:
    """For `/admin/state`. Some of it stays above zero in an idle pool, but does not grow: descriptors, tasks, blocks.

    reserved_s: predicted service seconds that workers count as theirs. kv_in_use: prompts and copies that keep blocks
    from being evicted. lost_blocks: slots that are neither free nor cached nor in use.
    """
    plane, caches, decode = pool.control_plane, pool.caches, pool.decode
    workers = plane.workers.all()
    stores = caches.stores.values()
    return {
        "requests": pool.num_open,
        "attempts": pool.num_attempts,
        "waiting": plane.num_waiting,
        "at_workers": sum(worker.num_outstanding for worker in workers),
        "reserved_s": sum(worker.queue.service_s for worker in workers),
        "steps": pool.num_steps,
        "copies": pool.num_copies,
        "switches": pool.num_switches,
        "kv_in_use": caches.num_in_use,
        "cached_blocks": sum(store.num_resident for store in stores),
        "allocated_blocks": sum(store.num_allocated for store in stores),
        "waiting_for_decode": decode.num_waiting,
        "handoffs": decode.num_handoffs,
        "decoding": decode.num_decoding,
        "decode_blocks": decode.num_used_blocks,
        "ranks_down": len(plane.lost_ranks) + sum(not rank["is_up"] for rank in decode.describe()),
        "tasks": len(asyncio.all_tasks()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "router_pid": os.getpid(),
        **pool.ranks.describe(),
    }
