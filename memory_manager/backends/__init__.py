"""The backends of the memory manager: one interface (`base.Backend`), several kinds of memory."""
