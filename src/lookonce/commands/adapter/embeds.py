"""`lookonce adapter embeds`: cached features for vLLM. The work is done in `adapter.embeds`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lookonce.commands.adapter.group import adapter
from lookonce.commands.options import JSON, PATH, cache_folder, emit


@adapter.command("embeds")
@click.argument("place", metavar="RUN|CACHE", type=PATH)
@click.argument("images", metavar="IMAGE...", type=PATH, nargs=-1, required=True)
@click.option("-o", "--output", type=PATH, metavar="FILE", required=True, help="File to write; it must not exist.")
@JSON
def embeds(place: Path, images: tuple[Path, ...], output: Path, as_json: bool) -> None:
    """Write cached features of images as the image_embeds that vLLM takes for Qwen3-VL.

    RUN is a run folder or a run file, CACHE the folder of a cache. The file is in safetensors and has the two tensors
    of one prompt: image_embeds, [tokens of all IMAGEs, hidden size * levels], and image_grid_thw, [IMAGEs, 3]. Nothing
    is computed: images must be in the cache.

    \b
    Keys of --json: file, image_embeds and image_grid_thw (their shape, and the grids), dtype, num_levels, size_bytes.

    \b
    Examples:
      lookonce adapter embeds runs/sample data/sample/images/frame-0026.jpg -o frame.safetensors
      lookonce adapter embeds caches/1f2e3d4c5b6a7980 before.jpg after.jpg -o pair.safetensors
    """
    from lookonce.adapter.embeds import export_embeds
    from lookonce.cache.store.reader import VisionCache
    from lookonce.run.folder import RECORD

    run_file = place / "run.yaml" if (place / RECORD).exists() else place
    done = export_embeds(VisionCache.open(cache_folder(run_file, ())), images, output)
    emit(asdict(done), done.text(), as_json)
