"""A run that ends before its first step: the draft as training would begin with it, for a server or a config check."""

from __future__ import annotations

import os
from pathlib import Path

from eagle3_fast.config import RunConfig
from eagle3_fast.log import logger
from eagle3_fast.model.draft import save_draft
from eagle3_fast.train.start import start_draft


def dry_run(config: RunConfig) -> Path:
    """Write the initial draft, servable, into `train.trainer.save_path` itself, where no checkpoint lies; returns that folder.

    Of several processes that a launcher started, the first one does it.
    """
    folder = Path(config.train.trainer.save_path)
    if os.environ.get("RANK", "0") != "0":
        return folder
    save_draft(start_draft(config), folder)
    logger.info("dry run: %s holds the untrained draft; train from it with --from-pretrained %s", folder, folder)
    return folder
