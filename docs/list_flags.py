"""Write the table of horovodrun's flags into docs/migrating-from-horovod.md, from the parsers.

python docs/list_flags.py
"""

import argparse
from pathlib import Path

from ringlet.ring.command import cli
from ringlet.ring.command.flags import meaning_of
from ringlet.ring.command.horovodrun import FLAGS, OTHERWISE

DOCUMENT = Path(__file__).with_name("migrating-from-horovod.md")
BEGIN, END = "<!-- flags: docs/list_flags.py -->\n", "<!-- end of flags -->\n"


def table():
    """Return the table as Markdown."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    cli.add_arguments(parser)
    rows = ["| horovodrun | `ringlet run` |", "|---|---|"]
    for group, flags in FLAGS.items():
        meanings = {}
        for flag in flags.split():
            said = OTHERWISE.get(flag) or meaning_of(parser, flag) or "missing"
            meanings.setdefault(said.replace("|", "\\|"), []).append(f"`{flag}`")
        rows += [f"| {group}: {', '.join(each)} | {said} |" for said, each in meanings.items()]
    return "\n".join(rows) + "\n"


def written(text):
    """Return the document's ``text`` with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
