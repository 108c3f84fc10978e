"""The entry of an env child: `python -m rl_core.envs.confined FD PARENT [FOLDER...]` goes behind the barrier, then serves as `child`.

FOLDERs are those that user code must not see; none at all = no barrier is wanted.
"""

import sys

from rl_core.envs.barrier import confine

if __name__ == "__main__":
    if len(sys.argv) > 3:
        # Before anything is imported that starts threads: only a process with one may enter a user namespace.
        refusal = confine(sys.argv[3:])
        if refusal:
            sys.stderr.write(
                f"env child: user code can reach keys and memory of this pod, the kernel allows no barrier: {refusal}\n"
            )

    from rl_core.envs.child import main

    sys.exit(main())
