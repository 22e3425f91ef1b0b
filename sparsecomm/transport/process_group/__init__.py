"""The transport over a process group of `torch.distributed`. Imported only by programs that have imported torch."""

from sparsecomm.transport.process_group.transport import ProcessGroupTransport, existing, of

__all__ = ["ProcessGroupTransport", "existing", "of"]
