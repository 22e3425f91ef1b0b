"""The entries of the reference: public names by section of a page.

In the repository, a section has a table with a sentence and the source of each name (`docs/tables.py`). The site adds
the docstring of each name below the table (`docs/hooks.py`).
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

__all__ = ["ENTRIES", "entries_of", "rows", "with_docstrings"]

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {
    "calls": "sparse_allreduce isparse_allreduce Handle topk threshold merge_topk SparseVector",
    "algorithms": "api.algorithms explain register_algorithm Algorithm",
    "reducer": "Reducer SparseAdamW Step Rebuilt Warmup",
    "local_steps": "LocalSteps OuterOptimizer NesterovSGD reshard",
    "checkpoints": "save load Checkpoint",
    "ranks": "shrink grow join realign last_call LastCall check_weights",
    "patches": "patches.Publisher patches.Published patches.Subscriber patches.diff patches.apply patches.read_patch "
    "patches.Patch patches.PatchError",
    "sources": "patches.Source patches.Folder patches.Http patches.Ranks",
    "types": "typing",
    "torch": "torch torch.SparseAdamW torch.register torch.SparseState torch.sparse_hook torch.DistributedOptimizer "
    "torch.SparseOptimizer torch.DiLoCo torch.register_fsdp torch.ShardedState torch.broadcast_parameters "
    "torch.keep_local torch.save torch.load torch.Checkpoint torch.Stateful torch.ProcessGroupTransport",
    "integrations": "integrations.lightning integrations.accelerate integrations.transformers integrations.attach",
    "jax": "jax jax.sparse_adamw jax.SparseAdamWState jax.sparsify jax.SparsifyState jax.allreduce_tree "
    "jax.init_residuals jax.sparse_allreduce jax.LocalSteps",
    "testing": "testing testing.run testing.Result testing.SimulatedTransport testing.expected_sum "
    "testing.num_contributors testing.assert_same_on_all_ranks testing.assert_nothing_lost",
    "errors": "SparseCommError InvalidInputError CollectiveMismatchError WeightMismatchError TransportError "
    "TimeoutError RankFailedError",
}
ENTRIES = {section: [f"sparsecomm.{name}" for name in names.split()] for section, names in SECTIONS.items()}
# Options of mkdocstrings.
OPTIONS = {
    "sparsecomm.api.algorithms": "show_root_full_path: false",
    "sparsecomm.jax": "members: false",
    "sparsecomm.testing": "members: false",
    "sparsecomm.torch": "members: false",
    "sparsecomm.typing": "members: false",
    "sparsecomm.torch.SparseAdamW": "inherited_members: [reducer, synchronize, no_sync, remove, rebuild, "
    "residuals_apart, state_dict, load_state_dict]",
    "sparsecomm.torch.ShardedState": "inherited_members: [reducer, synchronize, no_sync, rebuild, state_dict, "
    "load_state_dict]",
    "sparsecomm.jax.LocalSteps": "inherited_members: [state_dict, load_state_dict]",
}
TABLE = re.compile(r"<!-- table: reference_(\w+) -->\n(.*?)<!-- end table -->", re.DOTALL)
SOURCE = re.compile(r"\[(`[\w.]+`)\]\(\.\./\.\./sparsecomm/[\w/]+\.py\)")


@functools.cache
def _sources() -> Any:
    import griffe

    return griffe.load("sparsecomm", search_paths=[ROOT], allow_inspection=False)


def rows(section: str) -> list[list[str]]:
    """Return the rows of a section's table: each name, linked to its source, and the first sentence about it."""
    table = [["name", "what it is"]]
    for path in ENTRIES[section]:
        documented = _sources()[path.removeprefix("sparsecomm.")]
        documented = documented.final_target if documented.is_alias else documented
        sentence = re.split(r"(?<=\.)\s", " ".join(documented.docstring.value.split("\n\n")[0].split()))[0]
        source = os.path.relpath(documented.filepath, ROOT / "docs" / "reference")
        table.append([f"[`{path.removeprefix('sparsecomm.').removeprefix('api.')}`]({source})", sentence])
    return [[cell.replace("``", "`").replace("|", "\\|") for cell in row] for row in table]


def entries_of(markdown: str) -> list[str]:
    """Return the entries on a page."""
    return [path for section, _ in TABLE.findall(markdown) for path in ENTRIES[section]]


def with_docstrings(markdown: str) -> str:
    """Return a page of the site: docstrings below each table, whose names need no link to the source."""

    def section(match: re.Match[str]) -> str:
        entries = [f"::: {path}\n    options:\n      {OPTIONS.get(path, '{}')}\n" for path in ENTRIES[match[1]]]
        entries = [entry.replace("    options:\n      {}\n", "") for entry in entries]
        return "\n\n".join([SOURCE.sub(r"\1", match[2]), *entries])

    return TABLE.sub(section, markdown)
