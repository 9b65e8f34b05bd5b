"""A process that compiles kernels into the cache: a line of JSON for each comes in, and one with what went wrong goes out."""

import json
import os
import sys


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the compiler prints is no answer
    from postlude.targets.cute.build import Specialization, Target, object_path
    from postlude.targets.cute.configurations import Configuration

    for line in sys.stdin:
        asked = json.loads(line)
        os.environ["POSTLUDE_CACHE_DIR"] = asked.pop("folder")
        asked["layout"] = tuple(map(tuple, asked["layout"]))
        asked["configuration"] = Configuration(**asked["configuration"])
        asked["target"] = Target(**asked["target"] | {"clusters": tuple(asked["target"]["clusters"])})
        try:
            object_path(Specialization(**asked))
            fault = ""
        except Exception as error:  # whoever needs it compiles it again, and tells
            fault = f"{type(error).__name__}: {str(error).strip()[:500]}"
        answers.write(json.dumps(fault) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
