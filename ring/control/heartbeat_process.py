"""The program of a rank's heartbeat: little more than an import, of which Python keeps the code."""

import os
import sys
from types import ModuleType

if __name__ == "__main__":
    # Of these packages only modules are needed, not what they import themselves (NumPy, and more).
    for name in ("ringlet", "ringlet.ring", "ringlet.ring.control"):
        sys.modules[name] = ModuleType(name)
    control = os.path.dirname(os.path.abspath(__file__))
    sys.modules["ringlet.ring.control"].__path__ = [control]
    sys.modules["ringlet.ring"].__path__ = [os.path.dirname(control)]

    from ringlet.ring.control.heartbeat import main

    main()
