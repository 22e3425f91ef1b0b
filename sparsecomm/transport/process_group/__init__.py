"""The transport over a process group of `torch.distributed`. Imported only if the program has imported torch."""

from sparsecomm.transport.process_group.joining import existing, of
from sparsecomm.transport.process_group.transport import ProcessGroupTransport

__all__ = ["ProcessGroupTransport", "existing", "of"]
