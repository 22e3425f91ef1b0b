"""The transport over a process group of `torch.distributed`, under the name that programs import it by."""

from sparsecomm.transport.process_group import ProcessGroupTransport, of

__all__ = ["ProcessGroupTransport", "of"]
