"""The entry point of an env child: `python -m rl_core.envs.confined FD PARENT [FOLDER...]` isolates the process and then runs `child`.

FOLDERs are hidden from user code; without any the process is not isolated.
"""

import sys

from rl_core.envs.barrier import confine

if __name__ == "__main__":
    if len(sys.argv) > 3:
        # Before any import that starts threads: only a single-threaded process may enter a user namespace.
        refusal = confine(sys.argv[3:])
        if refusal:
            sys.stderr.write(
                f"env child: user code can reach keys and memory of this pod, the kernel allows no barrier: {refusal}\n"
            )

    from rl_core.envs.child import main

    sys.exit(main())
