"""From a job to processes: placement, launch plan, capacity, keys."""
