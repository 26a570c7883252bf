"""Exported snapshot → parallel COPY: the initial copy of tables, and their resync."""
