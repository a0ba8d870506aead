"""Set up the decoder layers for training on packs: attention, fewer passes, torch.compile, gradient checkpointing.

Compilation: transformers' layers are used unchanged and compiled one by one (regional compilation), so one graph serves
all layers and compiling takes seconds. For that the first layer's input gets a gradient like those of all others. The
graph also serves packs of all lengths (dynamic shapes), at most two percent slower than one for a single length. By
default PyTorch assumes that two sizes that happen to be equal always are ("duck shapes"), and would compile a special
graph if the first pack is as long as the model is wide; so duck shapes are off. Beyond its recompilation limit PyTorch
would continue uncompiled, and has been seen to give wrong results (https://github.com/unslothai/unsloth/pull/6871), so
the limit is out of reach, and reaching it is an error. Sharded layers (FSDP2) are compiled for the first length and
then for all: PyTorch treats their integer attributes as inputs, so with dynamic shapes from the start the size of an
attention head would be dynamic too, and FlexAttention cannot be compiled for that.

Kept code: what torch.compile made or used in a process (`torch.compiler.save_cache_artifacts`, some megabytes) is one
file for later processes, in a folder that all machines may share. Its name begins with a hash of the GPU, the versions
and the model, by which others are not read, and ends with the checksum of its content, by which damage is found. A file
gets its name when it is whole and is never changed, so any number of processes can write. PyTorch's own folder
(TORCHINDUCTOR_CACHE_DIR) has no checksums; it is left where it is, and gets what the files have. The newest files are
kept. They hold pickled objects and machine code, so those of other users, or that others may write to, are not read.

LoRA: a GPU spends more time on reading and writing what LoRA adds to a layer's output than on LoRA's small products. So
on a GPU each frozen weight and its LoRA matrices become one matrix (lora_joined.py), where they can; elsewhere, and
with quantised or sharded weights or dropout, LoRA's scale is part of its matrix B (lora.py).

Host-device syncs: Boolean indexing, count checks and `.tolist()` make the GPU wait for the CPU. transformers' model has
about ten per forward pass, where it adds images to text. `without_syncs` replaces two of its methods; a test checks
that they exist and that no bit of the result changes. Features are added as a tensor that is zero elsewhere, which
costs a tenth of a millisecond in each DeepStack level.

Gradient checkpointing: PyTorch's checkpoint is inside of a compiled layer, where the compiler only notes what not to
store. So a layer stays one graph, its passes can be captured as CUDA graphs, and dropout is the same in both passes.
`train.gradient_checkpointing: true` is for whole layers, `selective` for MLPs, which have most of the activations. With
dropout, a compiled layer that is checkpointed as a whole draws other random numbers than one that is not, because the
compiler numbers the draws of each graph by itself. Layers that are not compiled keep and set random states, so their
passes cannot be captured. FSDP's hooks are outside of a layer's forward method, as they must be.
"""

from __future__ import annotations

import contextlib
import copyreg
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import xxhash
from peft.tuners.lora.layer import Linear
from torch._dynamo.utils import counters
from torch._functorch import config as autograd_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental import _config as fx_config
from torch.utils.checkpoint import checkpoint

from lookonce.environment import device_name, library_version
from lookonce.errors import ModelError
from lookonce.families.family import Family
from lookonce.families.lookup import family_of
from lookonce.files import atomic_write, open_regular
from lookonce.run.sections import Checkpointing
from lookonce.text import Notify, first_line, size
from lookonce.train.model.attention import NAME
from lookonce.train.model.linear_attention import states_of_branches
from lookonce.train.model.load import base_model, is_sharded, replaced, text_model
from lookonce.train.model.lora import scaled_forward
from lookonce.train.model.loss import is_short, short_last_layer

COMPILER: dict[str, Any] = {
    "recompile_limit": 128,
    "accumulated_recompile_limit": 4096,
    "fail_on_recompile_limit_hit": True,
    "specialize_float": True,  # or the LoRA scale and each epsilon are inputs on the CPU, with C++ kernels to compile
    "optimize_ddp": False,  # would split graphs to exchange gradients earlier; one graph per layer does that already
}
AUTOGRAD: dict[str, Any] = {
    "ban_recompute_materialized_backward": False  # or the results of norms and SwiGLU are stored for products
}
"""Settings that let the backward pass compute cheap results again: a quarter less memory in the same time."""
SUFFIX = ".compiled"
MAX_FILES = 64
"""Number of files that are kept in a folder."""
CACHE_COUNTERS = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")
"""PyTorch's counters of graphs that were found, not found, and not looked up."""


@contextlib.contextmanager
def without_syncs(model: Any) -> Iterator[None]:
    """Replace the methods of a model that sync when they add images to text. `model` is without PEFT's wrapper."""
    inner, text = model.model, model.model.language_model
    image_token_id: int = inner.config.image_token_id

    def placeholders(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return (input_ids == image_token_id)[..., None], None

    methods = ((inner, "get_placeholder_mask", placeholders), (text, "_deepstack_process", add_features))
    with replaced((owner, name, method) for owner, name, method in methods if hasattr(owner, name)):
        yield


def add_features(hidden_states: torch.Tensor, is_image: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """`hidden_states` `[B, L, H]` plus `features` `[N, H]` at the `N` true positions of `is_image` `[B, L]`."""
    scattered = torch.zeros_like(hidden_states).masked_scatter(is_image[..., None], features.to(hidden_states.dtype))
    return hidden_states + scattered


class InputsAreStored(CustomGraphPass):
    """Unmarks inputs of a graph that torch 2.11 would compute again, which fails: the sizes of random tensors."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="placeholder"):
            node.meta.pop("recompute", None)

    def uuid(self) -> str:
        return type(self).__qualname__


@contextlib.contextmanager
def checkpointed(model: Any, how: Checkpointing) -> Iterator[None]:
    """Compute activations of the decoder layers again in the backward pass within the block.

    Those of the last layer are stored, as its backward pass comes first.
    """
    layers = text_model(model).layers[:-1] if how else []
    parts = [layer.mlp if how == "selective" else layer for layer in layers]
    stored = [(part, "stored_forward", part.forward) for part in parts]
    with (
        replaced([*stored, *((part, "forward", MethodType(_forward, part)) for part in parts)]),
        inductor_config.patch(joint_custom_post_pass=InputsAreStored() if how else None),
    ):
        yield


def _forward(part: Any, *args: Any, **options: Any) -> Any:
    """A module's forward method, checkpointed."""
    forward = partial(part.stored_forward, **options)
    return checkpoint(forward, *args, use_reentrant=False) if torch.is_grad_enabled() else forward(*args)


def load_compiler() -> None:
    """Import the compiler and Triton's kernels, which the first pass would import, if passes are compiled here.

    Its processes start too, which takes them some seconds. Until then, kernels would be compiled one after another.
    """
    if torch.cuda.is_available() and find_spec("triton"):
        for name in ("torch._inductor.compile_fx", "lookonce.train.model.lora_joined"):
            import_module(name)
        import_module("torch._inductor.async_compile").AsyncCompile.wakeup()


@contextlib.contextmanager
def fewer_passes(model: Any, *, joins: bool) -> Iterator[None]:
    """Compute LoRA layers with fewer passes through memory within the block; if it `joins`, by joined matrices."""
    layers: list[Any] = [one for one in model.modules() if type(one) is Linear and "forward" not in vars(one)]
    with contextlib.ExitStack() as within:
        within.enter_context(replaced((layer, "forward", MethodType(scaled_forward, layer)) for layer in layers))
        if joins:
            from lookonce.train.model.lora_joined import joined_layers  # here, as it looks for Triton

            within.enter_context(joined_layers(text_model(model), layers))
        yield


@contextlib.contextmanager
def training_on_packs(model: Any, *, compiled: bool, attention: str = NAME) -> Iterator[None]:
    """Set a model up for training on packs, with `compiled` decoder layers; undone on exit.

    `attention` is transformers' name of the attention of packs.

    Raises:
        ModelError: a layer does not use full attention, so it would mix the questions of a pack.
    """
    check_layers(family_of(model.config), text_model(model).config)
    trains = attention == NAME and torch.is_grad_enabled()  # else the last layer would be compiled for nothing
    last_layer = short_last_layer(model) if trains else contextlib.nullcontext()
    with (
        as_loaded(model, attention),
        for_all_lengths(),
        without_syncs(base_model(model)),
        fewer_passes(model, joins=_joins(model)),
        states_of_branches(model, compiled=compiled),
        last_layer,
        _inputs_with_gradient(text_model(model)) if compiled else contextlib.nullcontext(),
    ):
        for layer in text_model(model).layers if compiled else ():
            if not is_short(layer):  # else it would need a graph of its own, and is a small part of a step
                layer._compiled_call_impl = MethodType(compiled_call(None if is_sharded(model) else True), layer)
        yield


@cache
def compiled_call(dynamic: bool | None) -> Callable[..., Any]:
    """The compiled call of a layer, which is its first argument.

    One for all layers: `Module.compile` makes one for each, in a few milliseconds, at the beginning of each block.
    """
    return torch.compile(torch.nn.Module._call_impl, dynamic=dynamic)


@contextlib.contextmanager
def _inputs_with_gradient(text: Any) -> Iterator[None]:
    """Let embeddings have a gradient where other layers' inputs have one, though nothing is trained below them."""

    def require_gradient(text: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        embeddings = options.get("inputs_embeds")
        if torch.is_grad_enabled() and embeddings is not None and not embeddings.requires_grad:
            options["inputs_embeds"] = embeddings.detach().requires_grad_()
        return args, options

    with text.register_forward_pre_hook(require_gradient, with_kwargs=True):
        yield


def _joins(model: Any) -> bool:
    """Whether LoRA's matrices are joined with frozen weights: on a GPU with Triton, and if these are not sharded."""
    on_gpu = next(model.parameters()).is_cuda and find_spec("triton") is not None
    return on_gpu and torch.is_grad_enabled() and not is_sharded(model)


@contextlib.contextmanager
def as_loaded(model: Any, attention: str) -> Iterator[None]:
    """Use an attention and layers that are not compiled within the block, whatever they are outside of it."""
    text = text_model(model)
    before, text.config._attn_implementation = text.config._attn_implementation, attention
    try:
        with replaced((layer, "_compiled_call_impl", None) for layer in text.layers):
            yield
    finally:
        text.config._attn_implementation = before


@contextlib.contextmanager
def other_attention(model: Any, attention: str) -> Iterator[None]:
    """Use another attention within `training_on_packs`, with layers that are compiled once for all lengths."""
    layers = text_model(model).layers
    compiles = any(layer._compiled_call_impl for layer in layers)
    with as_loaded(model, attention):
        for layer in layers if compiles else ():
            layer._compiled_call_impl = MethodType(_compiled_apart(), layer)
        yield


@cache
def _compiled_apart() -> Callable[..., Any]:
    """As `compiled_call`, with code of its own, because passes of two attentions cannot share a graph."""

    def call(layer: Any, *args: Any, **options: Any) -> Any:
        return layer._call_impl(*args, **options)

    return torch.compile(call, dynamic=True)


@contextlib.contextmanager
def for_all_lengths() -> Iterator[None]:
    """Compile one graph for all lengths within the block."""
    with (
        torch._dynamo.config.patch(COMPILER),
        fx_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        autograd_config.patch(AUTOGRAD),
        _same_keys_in_all_programs(),
    ):
        yield


@contextlib.contextmanager
def _same_keys_in_all_programs() -> Iterator[None]:
    """Let the key of a graph not depend on which module of the process was the first to import torch.

    A key is the hash of a pickle, in which the memory format of a weight is `torch.contiguous_format` of the first
    module that has imported torch: the program itself if it imports multiprocessing before, as a study's process does.
    """
    reducers: dict[Any, Any] = copyreg.dispatch_table
    before = reducers.get(torch.memory_format)
    reducers[torch.memory_format] = _reduced
    try:
        yield
    finally:
        if before is None:
            del reducers[torch.memory_format]
        else:
            reducers[torch.memory_format] = before


def _reduced(memory_format: torch.memory_format) -> tuple[Any, ...]:
    return _memory_format, (str(memory_format).removeprefix("torch."),)


def _memory_format(name: str) -> Any:
    return getattr(torch, name)


def check_layers(family: Family, config: Any) -> None:
    """Refuse a language model's layers with a recurrent state or a sliding window, which no pack's mask restricts."""
    others = sorted(set(getattr(config, "layer_types", None) or ()) - family.layer_types)
    if others:
        raise ModelError(
            f"{family.name} has layers of {', '.join(others)}, which cannot keep the questions of a pack apart; "
            "set batch.mode: separate and eval.engine: generate"
        )


def num_compiled_graphs() -> int:
    """The number of graphs that torch.compile has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


class CompileCache:
    """The compiled code of one model on one kind of GPU, with one set of versions."""

    def __init__(self, folder: Path, model_config: Path, notify: Notify) -> None:
        """`model_config` is the model's configuration file."""
        self._folder, self._notify = folder, notify
        about = (device_name(), torch.__version__, torch.version.cuda, library_version("triton"))
        self._prefix = xxhash.xxh3_64_hexdigest(repr(about).encode() + model_config.read_bytes())
        self._loaded: set[str] = set()
        """The hashes of the code that was loaded."""

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Use what is kept within the block, and then keep what is new."""
        self.load()
        yield
        self.save()

    def load(self) -> None:
        """Give the compiler what earlier processes have kept; a note names each file that cannot be used."""
        if torch.cuda.is_available():
            # Triton's own default. The compiler sets another folder with the first kernel that it compiles, so a
            # process that finds all kernels would look for what starts them where it is not.
            home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
            os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(home, ".triton", "cache"))
        for path in self._folder.glob(f"{self._prefix}-*{SUFFIX}"):
            try:
                self._load(path)
            except FileNotFoundError:  # another process has removed it
                continue
            except Exception as error:  # of PyTorch, whose code for this must not end a training
                self._notify(f"cannot use {path} ({first_line(error)}); compiling its code again")

    def _load(self, path: Path) -> None:
        with open_regular(path) as file:
            if not _is_only_ours(os.fstat(file.fileno())):
                return
            content = file.read()
        if path != self._path(content):
            path.unlink()
            self._notify(f"removed {path}, which is damaged; compiling its code again")
        elif found := torch.compiler.load_cache_artifacts(content):
            self._loaded.update(*found.artifacts.values())

    def save(self) -> None:
        """Keep what the compiler has made or used, unless all of it was loaded; says how many graphs were found."""
        saved = torch.compiler.save_cache_artifacts()
        if saved is None:
            return
        content, made = saved
        hits, *others = (counters["aot_autograd"][name] for name in CACHE_COUNTERS)
        self._notify(f"compiled graphs: {hits + sum(others)}, {hits} of them from earlier processes")
        if self._loaded.issuperset(itertools.chain(*made.artifacts.values())):
            return
        try:
            self._write(content)
        except OSError as error:
            self._notify(
                f"compiled code is not kept in {self._folder} ({error.strerror}); choose another `cache.dir` to keep it"
            )

    def _write(self, content: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._path(content)) as temporary:
            temporary.write_bytes(content)
        path = self._path(content)
        path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))  # else it would not be read
        self._notify(f"kept {size(len(content))} of compiled code in {self._folder}")
        with contextlib.suppress(FileNotFoundError):  # another process removes them too
            everything = self._folder.glob(f"*{SUFFIX}*")  # also what killed processes left
            newest = sorted(everything, key=lambda path: -path.stat().st_mtime)
            for path in newest[MAX_FILES:]:
                path.unlink()

    def _path(self, content: bytes) -> Path:
        return self._folder / f"{self._prefix}-{xxhash.xxh3_128_hexdigest(content)}{SUFFIX}"


def _is_only_ours(status: os.stat_result) -> bool:
    """Whether a file belongs to this user and no other user may write to it."""
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
