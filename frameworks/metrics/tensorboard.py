"""Metrics for TensorBoard, through ``torch.utils.tensorboard``."""

from __future__ import annotations

from typing import Any

from ringlet.ring.safe_files import make_folder

Record = dict[str, Any]


class TensorBoard:
    """Writes scalars to ``directory``, by step; a sink of records.

    Raises ImportError when torch or tensorboard is missing, OSError where nothing can be written.
    """

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "metrics for TensorBoard need torch and tensorboard: "
                f"pip install 'ringlet[torch,viz]' ({error})"
            ) from None
        if "://" not in directory:  # TensorFlow, where it is there, would raise an error of its own
            make_folder(directory)
        make: Any = SummaryWriter
        self._writer = make(directory)
        self._failed = 0

    def write(self, record: Record) -> None:
        """Write what a record holds."""
        kind, add = record["kind"], self._writer.add_scalar
        if kind == "step":
            at, group = record["step"], record["group"]
            for name in ("raw_bytes", "wire_bytes", "ratio", "seconds", "uncompressed_s"):
                if name in record:
                    add(f"{group}/{name}", record[name], at)
            for phase in ("compress", "communicate", "decompress"):
                add(f"{group}/seconds/{phase}", record[f"{phase}_s"], at)
        elif kind == "layers":
            for layer in record["layers"]:
                for name in ("relative_error", "residual_norm", "norm"):
                    if name in layer:
                        add(f"{name}/{layer['name']}", layer[name], record["step"])
        elif kind in ("abandoned", "skipped"):
            self._failed += 1
            add("steps abandoned or skipped", self._failed, record["step"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
