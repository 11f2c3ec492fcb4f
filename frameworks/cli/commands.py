"""The sub-commands of ``ringlet``: where each is, what it does, and how they are listed."""

# A sub-command is a line: its name, the module with `add_arguments(parser)`, `main(options) -> int`
# and EXAMPLES, and what it does. Only the module that is needed is imported.
COMMANDS = {
    "run": ("ringlet.ring.command.cli", "start a program on several ranks, on one or more hosts"),
    "node": ("ringlet.ring.command.node", "start ranks on nodes that run one command, without ssh"),
    "manifest": ("ringlet.cli.manifest", "print the YAML of a job for Kubernetes"),
    "doctor": ("ringlet.cli.doctor", "say what is installed, and what the network can do"),
    "report": ("ringlet.cli.draw_report", "draw what compression saved or cost in a run"),
    "timeline": (
        "ringlet.cli.merge_timeline",
        "merge the parts of a timeline that a crash left behind",
    ),
    "check": ("ringlet.cli.check", "check whether a compressor or policy is what it claims"),
    "new": ("ringlet.compressors.testing.scaffold", "make a package for a compressor of your own"),
    "env": ("ringlet.cli.bug_report", "print what a bug report needs"),
    "completion": ("ringlet.cli.completion", "print a script that completes commands in a shell"),
}
# How they are listed; one that no group names stands under "more".
GROUPS = {
    "train": ["run", "node", "manifest"],
    "look at a network, or a run": ["doctor", "report", "timeline"],
    "write a compressor": ["new", "check"],
    "help": ["env", "completion"],
}

# What people call them elsewhere.
ALSO_CALLED = {
    "advise": "doctor", "predict": "doctor", "info": "env", "launch": "run", "start": "run",
    "exec": "run", "init": "new", "test": "check", "plot": "report",
    "conformance": "check", "verify": "check",
}  # fmt: skip


def grouped() -> dict[str, list[str]]:
    """Return the names of all commands by the heading that they stand under."""
    listed = {name for names in GROUPS.values() for name in names}
    more = [name for name in COMMANDS if name not in listed]
    return GROUPS | ({"more": more} if more else {})
