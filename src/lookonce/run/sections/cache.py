"""The section `cache` of the run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from lookonce.cache.format import Backend, DtypeName
from lookonce.run.sections.numbers import NumPixels
from lookonce.run.sections.paths import StagePath, UserPath
from lookonce.settings import Free, Same, Section


class CacheSection(Section):
    """The vision-feature cache."""

    dir: Free[UserPath] = Path("caches")
    """Folder of all caches. Each fingerprint has its own subfolder, so caches of several models can share it."""
    dtype: Same[DtypeName] = "bfloat16"
    """Storage type of the features, in which the tower also computes. fp8_e4m3 halves the size of bfloat16; the tower
    then computes in bfloat16."""
    backend: Same[Backend] = "pil"
    """Library that resizes images. The pixels of the two differ slightly, so each has its own cache."""
    min_pixels: Same[NumPixels | None] = None
    """Smaller images are enlarged to this many pixels; by default the model's own limit."""
    max_pixels: Same[NumPixels | None] = None
    """Larger images are shrunk to this many pixels; by default the model's own limit. An image has one token per
    32 x 32 pixels (28 x 28 in Qwen2-VL and Qwen2.5-VL), so a lower limit means fewer tokens, a smaller cache and faster
    training."""
    shard_mb: Free[Annotated[int, Field(ge=1, le=1_000_000)]] = 2048
    """Planned size of a shard in megabytes. A killed worker loses at most its unfinished shard and up to two tower
    batches of the next one."""
    stage: Free[StagePath | None] = None
    """Folder into which `lookonce cache stage` copied the cache, for example $SLURM_TMPDIR. Training reads the copy if
    it is complete, and the original otherwise. Only here, a variable that is not set is no error: there is no copy
    then."""
    claim_s: Free[Annotated[float, Field(ge=0.1, le=604_800)]] = 180
    """Seconds without a heartbeat after which a process on another machine counts as dead, and its shard, cache or run
    folder is taken over. Must be longer than a network file system needs to show one machine what another wrote."""
    check: Free[bool] = True
    """Verify each image's checksum whenever its features are read."""
