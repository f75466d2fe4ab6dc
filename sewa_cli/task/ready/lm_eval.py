"""`task: lm-eval`: a language model, scored by tasks of the lm-evaluation-harness.

The harness makes the prompts and judges the answers. A part is a document of a task. Requests are
built once, and the model stays in memory.
"""

from __future__ import annotations

import io
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import nn

from sewa_cli.errors import ConfigError
from sewa_cli.settings import Count, Settings, WholeNumber
from sewa_cli.task.ready import Newest, Ready, import_library
from sewa_cli.task.ready.args import Existing, parse
from sewa_cli.task.ready.folder import Dtype, Source, find_folders, has_config, making
from sewa_cli.text import did_you_mean

Document = tuple[str, int, str]  # its task, its number, and a hash of what is asked and wanted
# how the harness makes one number of those of all documents
MEAN = "mean"
PERPLEXITY = "perplexity"  # exp(−mean)
OF_PAIRS = ("weighted_perplexity", "bits_per_byte")  # of log-likelihoods and numbers of words


class HarnessArgs(Settings):
    """Names what the harness evaluates and how."""

    tasks: Annotated[list[str], Field(min_length=1)]
    heldout: list[str] = Field(default_factory=list)
    include_path: Existing | None = None
    limit: Annotated[float, Field(gt=0)] | None = None
    num_fewshot: Annotated[WholeNumber, Field(ge=0)] | None = None
    batch_size: Count = 16
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None
    gen_kwargs: dict[str, Any] = Field(default_factory=dict)
    model_args: dict[str, Any] = Field(default_factory=dict)


class LmEvalArgs(HarnessArgs):
    """All keys of `args`."""

    model: Annotated[Path, AfterValidator(has_config)] | None = None
    tokenizer: Existing | None = None
    dtype: Dtype = "auto"
    trust_remote_code: bool = False


def make(args: Mapping[str, Any], newest: Newest | None = None) -> Ready:
    settings = parse(LmEvalArgs, args)
    transformers = import_library("task: lm-eval", "transformers")
    opened = None if newest is None else newest()
    folders = find_folders(settings.model, settings.tokenizer, opened, of_images=False)
    source = Source(folders, settings.trust_remote_code, transformers)
    config = source.read("AutoConfig", folders.config)
    auto = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    harness = Harness(settings, source.read("AutoTokenizer", folders.words))
    functions = {
        "build_model": lambda: source.model(auto, "lm-eval", config, settings.dtype),
        **harness.functions,
    }
    notes = [folders.note] if folders.note else []
    return Ready(functions, folders.files, tuple(notes))


class Harness:
    """Scores models by documents of the harness's tasks."""

    def __init__(self, args: HarnessArgs, tokenizer: Any) -> None:
        import_library("task: lm-eval", "lm_eval")
        self._args, self._tokenizer = args, tokenizer
        self._wrapper: tuple[nn.Module, Any] | None = None
        self._tasks: dict[str, Any] = {}
        self._several = False
        self._requests: dict[tuple[str, int], list[Any]] = {}
        self.functions: dict[str, Callable[..., Any]] = {
            "scores": self.scores,
            "corpus": self.corpus,
        }
        with _quiet(), making("requests", "args.tasks"):
            manager = _manager(args)
            for function, named in (("score_parts", args.tasks), ("heldout_parts", args.heldout)):
                if named:
                    tasks = manager.load(named)["tasks"]
                    self._tasks |= tasks
                    self._several |= len(tasks) > 1
                    self.functions[function] = partial(list, [*self._documents(tasks)])

    @torch.inference_mode()
    def scores(self, model: nn.Module, parts: Sequence[Document]) -> list[dict[str, Any]]:
        """Return the metrics of each document, by the harness's names."""
        asked = [one for task, number, _ in parts for one in self._requests[task, number]]
        by_kind: dict[str, list[Any]] = defaultdict(list)
        for request in asked:
            request.resps, request.filtered_resps = [], {}
            by_kind[request.request_type] += [request] * request.repeats
        for kind, requests in by_kind.items():
            answers = getattr(self._wrapped(model), kind)(requests, disable_tqdm=True)
            for request, answer in zip(requests, answers, strict=True):
                request.resps.append(answer)
        for name in dict.fromkeys(task for task, _, _ in parts):
            self._tasks[name]._instances = [one for one in asked if one.task_name == name]
            self._tasks[name].apply_filters()
        return [self._judged(*part) for part in parts]

    def corpus(self, name: str, sums: Sequence[float]) -> float:
        metric = name.rpartition("/")[2].partition(",")[0]
        ways = (task.aggregation().get(metric) for task in self._tasks.values())
        make = next(way for way in ways if way is not None)
        found: float = make([sums[0] / sums[1] if make.__name__ == PERPLEXITY else sums])
        return found

    def _judged(self, name: str, number: int, _: str) -> dict[str, Any]:
        task, requests = self._tasks[name], self._requests[name, number]
        found: dict[str, Any] = {}
        filters = list(requests[0].filtered_resps)
        for chosen in filters:
            answers = [request.filtered_resps[chosen] for request in requests]
            for metric, value in task.process_results(requests[0].doc, answers).items():
                name_here = metric if len(filters) == 1 else f"{metric},{chosen}"
                how = getattr(task.aggregation().get(metric), "__name__", MEAN)
                if how == MEAN:
                    found[name_here] = value
                elif how == PERPLEXITY:
                    found[name_here] = [value, 1]
                elif how in OF_PAIRS:
                    found[name_here] = [*value]
        if self._several:
            found |= {f"{name}/{metric}": value for metric, value in found.items()}
        return found

    def _documents(self, tasks: Mapping[str, Any]) -> Iterator[Document]:
        """Build the requests of tasks, set up as by the harness's own command line."""
        from lm_eval.defaults import DEFAULT_OTHER_SEED
        from lm_eval.evaluator_utils import get_sample_size

        args = self._args
        for name, task in tasks.items():
            if args.gen_kwargs and task.get_config("output_type") == "generate_until":
                task.set_config("generation_kwargs", args.gen_kwargs, update=True)
            shots = task.get_config("num_fewshot")
            if shots is None or (args.num_fewshot is not None and shots != 0):
                task.set_config("num_fewshot", args.num_fewshot or 0)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
            task.build_all_requests(
                limit=get_sample_size(task, args.limit),
                system_instruction=args.system_instruction,
                apply_chat_template=args.apply_chat_template,
                fewshot_as_multiturn=args.fewshot_as_multiturn,
                chat_template=self._rendered if args.apply_chat_template else None,
            )
            by_document = defaultdict(list)
            for request in task.instances:
                by_document[request.doc_id].append(request)
            for number, requests in by_document.items():
                requests.sort(key=lambda request: request.idx)
                self._requests[name, number] = requests
                content = repr((requests[0].doc, [request.args for request in requests]))
                yield name, number, sha256(content.encode()).hexdigest()

    def _rendered(self, chat: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self._tokenizer.apply_chat_template(
            chat,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _wrapped(self, model: nn.Module) -> Any:
        """Return the model as the harness wants it; weights change inside it."""
        if self._wrapper is None or self._wrapper[0] is not model:
            from lm_eval.models.huggingface import HFLM

            args = self._args
            with _quiet():
                wrapped = HFLM(
                    pretrained=model,
                    tokenizer=self._tokenizer,
                    batch_size=args.batch_size,
                    **args.model_args,
                )
            evaluate = wrapped._loglikelihood_tokens
            wrapped._loglikelihood_tokens = lambda requests, **options: evaluate(
                requests, **{**options, "disable_tqdm": True}
            )
            self._wrapper = model, wrapped
        return self._wrapper[1]


def _manager(args: HarnessArgs) -> Any:
    """Return the harness's task manager; without its own 14,000 tasks where none is asked for."""
    from lm_eval.tasks import TaskManager

    named = [*args.tasks, *args.heldout]
    if args.include_path is not None:
        own = TaskManager(include_path=args.include_path, include_defaults=False)
        if {*named} <= {*own.all_subtasks}:
            return own
    manager = TaskManager(include_path=args.include_path)
    unknown = [name for name in named if name not in manager.all_tasks and not Path(name).is_file()]
    if unknown:
        raise ConfigError(
            *(
                f"args.tasks: lm-eval has no {name}; "
                + did_you_mean(name, manager.all_tasks, "your own are found by args.include_path")
                for name in unknown
            )
        )
    return manager


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide bars and notes, and draw what the harness's own command line draws."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from tqdm import tqdm

    tqdm.set_lock(RLock())  # its own is one between processes, which a worker that ends leaks

    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
