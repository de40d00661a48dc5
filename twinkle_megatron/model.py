"""MegatronModel: Twinkle's training interface over Megatron-Core model chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .batch import without_labels
from .evaluation import Evaluation, OutputsAlone
from .groups import Groups, check_megatron_groups
from .locate import Located, locate
from .loss.build import build_loss
from .loss_watch import LossWatch, is_rerun
from .megatron import checks
from .megatron.accumulation import Accumulation
from .megatron.build import build
from .megatron.checkpoint import Training, load_checkpoint, save_checkpoint
from .megatron.checkpoint_files import OF_CALLER
from .megatron.checkpoint_state import Choices
from .megatron.choices import choices, choose_as
from .megatron.compatibility import check_reference
from .megatron.engine import NO_EXTRAS, Engine
from .megatron.forward_step import Progress
from .megatron.optimizer import learning_rate, loss_scaling
from .megatron.plan import Extras, Plan
from .megatron.schedule import Outcome
from .megatron.snapshot import Snapshot
from .megatron.steps import Steps
from .metric import Metric, build_metric
from .plugin import is_address, load_plugin
from .reference import Reference
from .seen import Pooled, PooledHead, Seen
from .teacher import Teacher

logger = logging.getLogger('twinkle_megatron')


class Looked(NamedTuple):
    """What `forward` was given and saw, and the keywords of `calculate_loss`."""

    inputs: Any
    micro_batch_size: int | None
    max_tokens: int | None
    shifted: bool
    kept: list[Seen | Pooled]
    extra: dict[str, Any]


class MegatronModel:
    """Trains and evaluates Megatron-Core chunks with this package's losses and metrics.

    The gradient, the loss and every metric are those of the global batch: the same numbers, up to rounding, under
    every TP, PP, VPP, CP, DP and SP layout and every split into micro-batches.

    Args:
        chunks: this rank's model chunks (one, or a list under the interleaved schedule), wrapped in Megatron's
            DistributedDataParallel, or bare where there is no DP, CP, PP and SP.
        optimizer: Megatron's (`get_megatron_optimizer`); a torch optimizer for bare chunks. None: no training steps.
        scheduler: `step(increment)` or `step()` is called after each optimizer step; one increment is one step.
        groups: a `ProcessGroupCollection`; None: Megatron's global groups, as is `Groups` made from them.
        vocab_size: true vocabulary size, if the model's is padded. Ids at or past it take no probability.
        head: 'logits' has Megatron multiply the logits out; 'linear' computes losses and metrics from the hidden states
            and the weight, a few columns at a time, so that no tensor of tokens × vocabulary exists; 'auto' takes
            'linear' where the logits of a micro-batch are large beside the free memory, and says once what it took.
            The numbers are the same up to rounding. A custom loss gets a `LinearHead` as `outputs['logits']`, which
            becomes the tensor if it is used as one. An `EmbeddingHead` or a `ScalarHead` stands in place of the
            vocabulary: the model gives sentence embeddings or values. Losses of such have a default one.
        max_workspace_mb: MiB for tiles of logits under 'linear', see `LinearHead`.

    Every method is collective: all ranks call it, with the data of their own data parallel replica, which is the same
    on all TP, PP and CP ranks. ValueError, on every rank, for a layout or configuration that would give wrong
    gradients.
    """

    def __init__(
        self,
        chunks: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        groups: Any = None,
        *,
        vocab_size: int | None = None,
        head: str | PooledHead = 'auto',
        max_workspace_mb: float | None = None,
    ) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        collection = None if groups is None or isinstance(groups, Groups) else groups
        if isinstance(groups, Groups):
            check_megatron_groups()
        self.groups = groups if isinstance(groups, Groups) else Groups.from_megatron(collection)
        self._engine = Engine(
            chunks,
            self.groups,
            collection,
            vocab_size=vocab_size,
            head=head,
            max_workspace_mb=max_workspace_mb,
            scale_loss=loss_scaling(optimizer),
            optimizer=optimizer,
        )
        self.chunks, self.config, self.vocab_size = self._engine.chunks, self._engine.config, self._engine.vocab_size
        self._accumulation = Accumulation(self._engine.runner)
        self._given_vocab_size = vocab_size
        self._loss: Callable[..., Any] | None = None
        self._metrics: dict[bool, list[Metric]] = {True: [], False: []}
        self._stepping = Steps(self, self._engine, self._accumulation, self.groups, self._tell_step)
        self._calls = 0
        self._looked: Looked | None = None
        self._watch: LossWatch | None = None

    @classmethod
    def from_config(
        cls,
        config: Any,
        vocab_size: int,
        *,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        vpp: int = 1,
        ep: int = 1,
        optimizer: Any = None,
        scheduler: Any = None,
        ddp: Any = None,
        layer_spec: Any = None,
        value_head: bool = False,
        seed: int = 1234,
        head: str | PooledHead = 'auto',
        max_workspace_mb: float | None = None,
        **model: Any,
    ) -> MegatronModel:
        """A GPT with random weights in that layout, ready to train. Collective: every process calls it.

        torch.distributed and Megatron's groups are made where they are not there; data parallelism takes the processes
        that are left. On CPU, `megatron.cpu.install()` comes first.

        Args:
            config: Megatron's TransformerConfig; the parallel sizes in it are replaced by these.
            vocab_size: the true one, which is padded to a multiple of 128 · tp.
            tp, pp, cp, vpp, ep: tensor, pipeline, context, virtual pipeline and expert parallel sizes.
            optimizer: Megatron's OptimizerConfig, or a learning rate for its Adam; None: no optimizer.
            scheduler: see the constructor.
            ddp: a DistributedDataParallelConfig; None: gradients are reduced in float32, and with the distributed
                optimizer if the OptimizerConfig says so.
            layer_spec: of the layers; None: those of Transformer Engine where it is installed, else local ones.
            value_head: adds one, for `ScalarHead`.
            seed: of the weights.
            head, max_workspace_mb: see the constructor.
            model: `max_sequence_length` (4096), `position_embedding_type` ('rope'), `rotary_base`, `rotary_percent`,
                `tied` (embedding and output layer share their weight).
        """
        built = build(
            config,
            vocab_size,
            tp=tp,
            pp=pp,
            cp=cp,
            vpp=vpp,
            ep=ep,
            seed=seed,
            layer_spec=layer_spec,
            ddp=ddp,
            optimizer=optimizer,
            value_head=value_head,
            **model,
        )
        return cls(
            built.chunks,
            built.optimizer,
            scheduler,
            vocab_size=vocab_size,
            head=head,
            max_workspace_mb=max_workspace_mb,
        )

    def set_loss(
        self,
        loss: Any,
        *,
        trust_remote_code: bool | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        **init: Any,
    ) -> None:
        """Sets the loss: a class of this package (made with `init`), its name ('GRPOLoss', or 'grpo'), an instance, or
        any callable `(inputs, outputs, **extra)` that returns a scalar tensor or `{'loss': ..., 'num_tokens': ...}`.

        Or the address of one on a hub or in a file, 'ms://group/name', 'hf://group/name', 'file:path.py:Name', for
        which the other keywords are; see `load_plugin`, and docs/plugins.md.

        A callable gets this rank's labels in `inputs`, and in `outputs` the `logits` shard, its `vocab_shard` and
        `logps`; or what a head gives in place of logits. One that names the keyword `batch` gets a `TokenBatch`, and
        returns its summand of the loss of the global batch, as `batch.mean(values, over='tokens')` (or 'sequences',
        'pairs') gives it: such a loss is exact under every layout and split; docs/custom.md has examples. What it needs
        for each token belongs in `inputs`, where it is split as the tokens are. Its attributes `needs` (names of
        `TokenStats`), `temperature` and `ignore_index` steer the sweep, where it has them; `reads` ('embeddings',
        'values') asks for a head, and `layout` 'groups' says that labels begin groups of sequences, which no
        micro-batch may cut ('interleaved' and 'separated' of pairs); `over`, a name in `batch.Counts`, says how calls
        weigh that are accumulated before one step.
        """
        hub = {'trust_remote_code': trust_remote_code, 'revision': revision, 'cache_dir': cache_dir}
        if is_address(loss):
            loss = load_plugin(loss, 'loss', groups=self.groups, **hub)
        self._loss = build_loss(loss, **init)

    def set_head(self, head: str | PooledHead) -> None:
        """Sets what the last stage gives: 'auto', 'logits', 'linear', an `EmbeddingHead` or a `ScalarHead`, as in the
        constructor. The chunks themselves are not changed by it, so that it can be changed again at any time."""
        self._engine.set_head(head)

    def add_metric(
        self,
        metric: Any,
        is_training: bool | None = None,
        *,
        trust_remote_code: bool | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        **init: Any,
    ) -> None:
        """Adds a metric: a class (made with `init`, `device_mesh` and the DP×CP group), its name ('Accuracy', or
        'accuracy'), an instance, or its address, for which see `set_loss`.

        It is fed by `forward_backward` (is_training True), by `forward_only` (False), or for a class or name by
        default by both, as two separate metrics; an instance goes to training by default.
        """
        if is_address(metric):
            hub = {'trust_remote_code': trust_remote_code, 'revision': revision, 'cache_dir': cache_dir}
            metric = load_plugin(metric, 'metric', groups=self.groups, **hub)
        both = is_training is None and (isinstance(metric, (str, type)))
        for mode in (True, False) if both else (is_training is not False,):
            made = build_metric(metric, device_mesh=self.groups, process_group=self.groups.dp_cp, **init)
            self._metrics[mode].append(made)

    def set_metric(self, metric: Any, is_training: bool | None = None, **init: Any) -> None:
        """`add_metric` in place of the metrics added before, which stay where that fails."""
        before = {mode: list(metrics) for mode, metrics in self._metrics.items()}
        try:
            self.add_metric(metric, is_training, **init)
        except BaseException:
            self._metrics = before
            raise
        for mode in (True, False) if is_training is None else (is_training,):
            self._metrics[mode] = self._metrics[mode][len(before[mode]) :]

    def forward_backward(
        self,
        inputs: Any,
        micro_batch_size: int | None = None,
        *,
        max_tokens_per_micro_batch: int | None = None,
        finalize: bool = True,
        shifted: bool = True,
        progress: Progress | None = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """Accumulates the gradient of the mean loss over this call's global batch.

        Args:
            inputs: this replica's micro-batches (InputFeature with 2-D tensors `[b, s]`, or one packed row `[1, T]`
                with `position_ids` or `cu_seqlens`), or samples (1-D), collated by `micro_batch_size`. Labels are
                shifted already.
            max_tokens_per_micro_batch: pack samples into rows `[1, T]` of at most so many tokens, in place of
                `micro_batch_size`; the same on every rank. All replicas make equally many, as many as the one that
                needs most, and each spreads its own tokens evenly over them; pairs and groups are not cut. Under
                context parallelism the tokens of a row are those of all CP ranks together, each sample rounded up to a
                multiple of 2 · cp. Keywords stay in sample order. ValueError for inputs that are not samples, and where
                a sample, a pair or a group is longer than this.
            finalize: reduce the gradients now, so that `main_grad` (or `grad` without DDP) is that of the global loss.
                With False they stay local sums until a later call or the step finalises, which saves that much
                communication.
            progress: called as `progress(done, count)` after each of this rank's micro-batches has passed its chunks
                forward, for a progress bar; on every rank where it is given. A first pass does not count.
            shifted: whether keywords with an entry for every token are aligned with the labels; False: with
                `input_ids`.
            extra: keywords of the loss and the metrics, for the whole call in sample order (a sample is a sequence,
                also one of a packed row): see the loss, and `align_extras` for the forms they may have. Of a custom
                loss, tensors and lists with one entry a sample are split like the samples. They are looked at on the
                last pipeline stage only.

        Returns `{'loss': float, 'logps': [...]}`: the global loss, the same on every rank; on the last stage the
        log-prob of each label, one `[b, s]` a micro-batch, in nats, 0 where ignored. With a head in place of the
        vocabulary it is `{'loss': float, 'embeddings': [...]}` `[n, H]`, or 'values' `[n]` or `[b, s]`; its labels are
        one entry a sequence, `[b]` beside `[b, s]`, `[n]` beside a packed row, a number beside a sample; or of values
        per token a number each. With a budget of tokens there is one tensor a sample in their place, in input order:
        log-probs or values `[s]`, an embedding `[H]`, or a value.

        Several calls before one step accumulate the mean over all their tokens (or sequences, or pairs, where the loss
        is a mean over these; one of several means, as CPO and ORPO, is exact within a call only); these calls must all
        be means over the same things. A global batch without trained tokens gives 0.0 and no gradient.

        An error in the data, the loss or a metric on one rank is raised on every rank, naming it, and leaves no
        gradient, of earlier calls neither.
        """
        checks.check_grad_mode()
        evaluation = self._evaluation(training=True)
        with self._accumulation.dropped_on_error():
            given = Extras(extra, evaluation.extras, shifted, evaluation.unsaid(extra))
            plan = self._engine.plan(
                inputs, micro_batch_size, given, evaluation, training=True, max_tokens=max_tokens_per_micro_batch
            )
            items = getattr(plan.counts, evaluation.over)
            if items == 0:
                if finalize:
                    self._accumulation.ready()  # what earlier calls have left
                return self._result(self._engine.nothing(plan, evaluation), plan, evaluation)
            with self._accumulation.adding(plan.counts.tokens, items, evaluation.over, finalize) as scale:
                outcome = self._engine.forward_backward(plan, evaluation, scale, finalize, progress)
        result = self._result(outcome, plan, evaluation)
        complaint = None if self._watch is None or is_rerun() else self._watch.complaint(outcome.loss)
        if self._watch is not None and complaint is not None:
            result['located'] = located = locate(self._engine, plan, evaluation.without_metrics(), self._watch.top)
            if self.groups.owns_output:
                logger.error('call %d: %s\n%s', self._calls, complaint, located)
        return result

    def forward_only(
        self,
        inputs: Any,
        micro_batch_size: int | None = None,
        *,
        max_tokens_per_micro_batch: int | None = None,
        shifted: bool = True,
        progress: Progress | None = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """`forward_backward` without gradients, in eval mode, for the metrics of evaluation."""
        evaluation = self._evaluation(training=False)
        given = Extras(extra, evaluation.extras, shifted, evaluation.unsaid(extra))
        plan = self._engine.plan(
            inputs, micro_batch_size, given, evaluation, training=False, max_tokens=max_tokens_per_micro_batch
        )
        return self._result(self._engine.forward(plan, evaluation, progress), plan, evaluation)

    def locate(
        self,
        inputs: Any,
        micro_batch_size: int | None = None,
        *,
        max_tokens_per_micro_batch: int | None = None,
        shifted: bool = True,
        top: int = 5,
        **extra: Any,
    ) -> Located:
        """Where a loss that is not finite, or unusually large, comes from: the first module whose output is not finite,
        and the `top` tokens with the largest losses, each with its sample, place and rank. `print` it.

        Takes what `forward_backward` takes. One forward pass in eval mode, with a look at every module's output (one
        read from the device each), and a few collectives; no gradient, no metric and no random number is touched.
        """
        evaluation = self._evaluation(training=False).without_metrics()
        given = Extras(extra, evaluation.extras, shifted, evaluation.unsaid(extra))
        plan = self._engine.plan(
            inputs, micro_batch_size, given, evaluation, training=False, max_tokens=max_tokens_per_micro_batch
        )
        return locate(self._engine, plan, evaluation, top)

    def watch_loss(self, spike: float | None = 10.0, top: int = 5) -> None:
        """From now on `forward_backward` locates a loss that is not finite, or more than `spike` times the largest one
        before: the report is logged by one rank, and is in the result under 'located'. None: no more.

        The look costs one more forward pass, in such a call only. Gradients are left as they are. Inside a loop of
        Megatron's `rerun_state_machine` the loss of every micro-batch is validated whether or not this is on, so that
        Megatron runs the step again and tells a fault of the machine from one of the data; see docs/check.md.
        """
        self._watch = None if spike is None else LossWatch(spike, top)

    def predict(
        self, inputs: Any, micro_batch_size: int | None = None, *, max_tokens_per_micro_batch: int | None = None
    ) -> list[Tensor]:
        """What a head in place of the vocabulary gives, in eval mode, without labels and without a loss.

        On the last stage one tensor a micro-batch, of this replica's sequences in input order: embeddings `[n, H]`, or
        values `[n]` or `[b, s]`; elsewhere none. With `max_tokens_per_micro_batch` (see `forward_backward`) one tensor
        a sample: `[H]`, a number or `[s]`. The head is the one that was set, else that of the loss. Collective: all
        ranks call it, with the inputs of their own replica.
        """
        head = self._engine.pooled or self._engine.head_for(self._loss)
        if head is None:
            raise ValueError(
                'predict needs a head in place of the vocabulary: model.set_head(EmbeddingHead()), or ScalarHead()'
            )
        evaluation = Evaluation(OutputsAlone(), [], self.groups, self._engine.shard, {}, head)
        unlabelled = without_labels(inputs)
        plan = self._engine.plan(
            unlabelled, micro_batch_size, NO_EXTRAS, evaluation, training=False, max_tokens=max_tokens_per_micro_batch
        )
        return plan.as_given(self._engine.forward(plan, evaluation).results, evaluation.per_token)

    def reference(
        self, chunks: Any = None, *, adapter_off: Callable[[], Any] | None = None, cache: str | Path | None = None
    ) -> Reference:
        """A frozen policy beside this one, which gives log-probs for the same micro-batches; see `Reference`.

            reference = model.reference()
            model.forward_backward(inputs, ref_logps=reference.logps(inputs))

        Args:
            chunks: its own chunks, in the same layout, wrapped or bare. None: the weights that this model has now, of
                which a copy is kept in host memory, or those under `adapter_off`.
            adapter_off: called without arguments, gives a context manager within which this model's chunks compute
                the reference, as where an adapter (LoRA) is switched off.
            cache: a directory to keep the log-probs in, and to take them from for micro-batches seen before.
        """
        if chunks is not None and adapter_off is not None:
            raise ValueError('a reference is made of chunks or of adapter_off, got both')
        if adapter_off is not None and not callable(adapter_off):
            raise ValueError(
                'adapter_off must be a function that returns a context manager, got '
                f'{type(adapter_off).__name__}; leave out the () where it is called'
            )
        if cache is not None and not isinstance(cache, (str, Path)):
            raise ValueError(f'cache must be the path of a directory, got {cache!r}')
        within: Callable[[], Any] = nullcontext
        if chunks is None:
            check_reference(self.config, adapter_off is not None)
            within = adapter_off or Snapshot(self.chunks, self._engine.models).swapped_in
        engine = self._engine if chunks is None else self._engine.beside(chunks)
        return Reference(engine, self._all_evaluations, within, cache)

    def teacher(self, chunks: Any, vocab_size: int | None = None) -> Teacher:
        """A frozen teacher beside this model, for `GKDLoss`; see `Teacher`.

            teacher = model.teacher(teacher_chunks)
            model.forward_backward(inputs, teacher=teacher.heads(inputs))

        Args:
            chunks: its own, in the same layout, wrapped or bare; any hidden size and number of layers.
            vocab_size: its true vocabulary size; None: that of this model, or the teacher's if that is padded less.
        """
        (model, *_), _ = checks.unwrap(chunks if isinstance(chunks, (list, tuple)) else [chunks])
        sizes = [size for size in (getattr(model, 'vocab_size', None), self.vocab_size) if size is not None]
        engine = self._engine.beside(chunks, head='linear', vocab_size=vocab_size or min(sizes, default=None))
        return Teacher(engine, self._engine, self._all_evaluations)

    def forward(
        self,
        inputs: Any,
        micro_batch_size: int | None = None,
        *,
        max_tokens_per_micro_batch: int | None = None,
        shifted: bool = True,
    ) -> dict[str, Any]:
        """The outputs alone, as the first part of the form in three parts:

            model.forward(inputs)
            loss = model.calculate_loss(advantages=advantages)
            model.backward()

        Returns `{'logps': [...]}`, or what the head gives, like `forward_backward`, in the mode that the chunks are in,
        without gradients. `backward` runs the forward pass anew, as Megatron's schedules interleave both, with the same
        random numbers if none are drawn between. So the form costs one forward pass more than `forward_backward`, and
        one more for `calculate_loss` of a loss that reads logits, a custom one or `GKDLoss`. Collective.
        """
        evaluation = self._evaluation(training=True)
        plan = self._engine.plan(
            inputs, micro_batch_size, None, evaluation, training=False, max_tokens=max_tokens_per_micro_batch
        )
        outcome, kept = self._engine.look(plan, evaluation)
        self._looked = Looked(inputs, micro_batch_size, max_tokens_per_micro_batch, shifted, kept, {})
        found = self._result(outcome, plan, evaluation)
        del found['loss']
        return found

    def calculate_loss(self, **extra: Any) -> float:
        """The global loss of the inputs that `forward` was given, the same number on every rank. `extra`: keywords of
        the loss and the metrics, see `forward_backward`; `backward` uses the same. Collective."""
        looked = self._needed_look('calculate_loss')
        evaluation = self._evaluation(training=True)
        given = Extras(extra, evaluation.extras, looked.shifted, evaluation.unsaid(extra))
        plan = self._engine.plan(
            looked.inputs, looked.micro_batch_size, given, evaluation, training=True, max_tokens=looked.max_tokens
        )
        looked = self._looked = looked._replace(extra=extra)
        if getattr(plan.counts, evaluation.over) == 0:
            return 0.0
        return self._engine.revisit(plan, evaluation.without_metrics(), looked.kept)

    def backward(self, *, finalize: bool = True) -> None:
        """Accumulates the gradient of what `calculate_loss` computed, and feeds the metrics; see `forward_backward`.
        Collective."""
        looked, self._looked = self._needed_look('backward'), None
        self.forward_backward(
            looked.inputs,
            looked.micro_batch_size,
            max_tokens_per_micro_batch=looked.max_tokens,
            finalize=finalize,
            shifted=looked.shifted,
            **looked.extra,
        )

    def _needed_look(self, method: str) -> Looked:
        if self._looked is None:
            raise ValueError(f'{method} must be called after forward(inputs), whose inputs it is for')
        return self._looked

    def clip_grad_norm(self, max_grad_norm: float | None = 1.0) -> float | None:
        """Clips the gradient to `max_grad_norm` (2-norm over the whole model; None: no clipping), for `step`.

        Returns the norm before clipping, the same on every rank, or None where there is nothing to step on. Collective.
        """
        return self._stepping.clip(max_grad_norm)

    def step(self) -> bool:
        """Takes an optimizer step, with the gradient as `clip_grad_norm` left it, or without clipping. The gradients
        stay until `zero_grad`, the learning rate until `lr_step`. Returns whether a step was taken. Collective."""
        return self._stepping.step()

    def lr_step(self) -> None:
        """Advances the scheduler, if the last step was taken."""
        self._stepping.advance()

    def clip_grad_and_step(self, max_grad_norm: float | None = 1.0) -> float | None:
        """Clips the gradient to `max_grad_norm` (2-norm over the whole model; None: no clipping), steps, zeroes
        gradients, advances the scheduler.

        Returns the norm before clipping, the same on every rank, or None where no step was taken: nothing was
        accumulated (no trained tokens, or the last call failed), or the loss scaler found inf or NaN.
        """
        return self._stepping.whole(max_grad_norm)

    def _tell_step(self, rate: Any, step: int, norm: float | None) -> None:
        for metric in self._metrics[True]:
            report = getattr(metric, 'on_step', None)
            if report is not None:
                report(lr=rate, step=step, gradient_accumulation_steps=1, grad_norm=norm)

    def zero_grad(self) -> None:
        """Forgets the accumulated gradients."""
        self._stepping.zero_grad()

    def save(self, folder: str | Path, *, state: Mapping[str, Any] | None = None, keep: int | None = None) -> Path:
        """Saves weights, optimizer, scheduler, random numbers and the count of steps as a folder of this step in
        `folder`, on a file system that all ranks share, and returns it.

        A save that is interrupted leaves the earlier ones as they are. What metrics have summed up goes with it, and
        is taken up in the same layout by metrics of the same kinds; so do the choice of the head and the size of its
        tiles. The weights of a `reference` are not saved.

        Args:
            state: more to be kept, such as the position in the data: numbers, strings, tensors, and lists and dicts of
                them; that of rank 0.
            keep: afterwards only the last so many are kept; None: all.

        Collective. ValueError where gradients are accumulated, which are not saved: step first, or `zero_grad`.
        """
        if self._accumulation.holds_gradients:
            raise ValueError('save must be called between steps: gradients are accumulated; step, or zero_grad, first')
        own = {'calls': self._calls, 'grad_norm': self._stepping.grad_norm, OF_CALLER: dict(state or {})}
        return save_checkpoint(folder, self._training(), step=self._stepping.count, state=own, keep=keep)

    def load(self, folder: str | Path, *, step: int | None = None, weights_only: bool = False) -> dict[str, Any]:
        """Loads what `save` has saved in `folder`, and returns its `state`, with the number of its 'step'.

        In the same layout training goes on to the bit; in another one to rounding, with other random numbers. Gradients
        are zeroed.

        Args:
            step: which one; None: the last complete one.
            weights_only: leave optimizer, scheduler, random numbers and the count of steps as they are.

        Collective. ValueError, on every rank, where there is none, or that of another model.
        """
        self.zero_grad()
        found = load_checkpoint(folder, self._training(), step=step, weights_only=weights_only)
        if not weights_only:
            self._calls = int(found['calls'])
            self._stepping.count, self._stepping.grad_norm = int(found['step']), found['grad_norm']
        return {**found[OF_CALLER], 'step': found['step']}

    def _training(self) -> Training:
        """What a checkpoint holds of this rank."""
        engine, device = self._engine, self._engine.runner.device
        return Training(
            self.chunks,
            engine.models,
            self.groups,
            self.optimizer,
            self.scheduler,
            self._given_vocab_size,
            metrics=[metric for mode in (True, False) for metric in self._metrics[mode]],
            choices=Choices(
                lambda: choices(engine.head_choice, device), lambda kept: choose_as(kept, engine.head_choice, device)
            ),
        )

    def calculate_metric(self, is_training: bool = True) -> dict[str, Any]:
        """What the metrics of training (or of evaluation) say, for display, the same on every rank; resets them."""
        return {
            key: value for metric in self._metrics[is_training] for key, value in (metric.calculate() or {}).items()
        }

    def metric_values(self, is_training: bool = True) -> dict[str, float]:
        """The same as floats, for loggers, without a reset, of those metrics that have `values`."""
        metrics = [metric for metric in self._metrics[is_training] if hasattr(metric, 'values')]
        return {key: value for metric in metrics for key, value in metric.values().items()}

    def _evaluation(self, training: bool) -> Evaluation:
        loss, self._calls = self._needed_loss(), self._calls + 1
        head = self._engine.head_for(loss)
        return Evaluation(loss, self._metrics[training], self.groups, self._engine.shard, self._facts(), head)

    def _needed_loss(self) -> Callable[..., Any]:
        if self._loss is None:
            raise ValueError('no loss is set: call set_loss(CrossEntropyLoss) first')
        return self._loss

    def _all_evaluations(self) -> Evaluation:
        """With the metrics of both modes: on the layout of pairs they all have to agree. ValueError where there are no
        logits."""
        if self._engine.head_for(self._needed_loss()) is not None:
            raise ValueError(
                f'{type(self._loss).__name__} is not computed from logits, which a reference or a teacher gives'
            )
        metrics = [metric for mode in self._metrics.values() for metric in mode]
        return Evaluation(self._needed_loss(), metrics, self.groups, self._engine.shard, {})

    @staticmethod
    def _result(outcome: Outcome, plan: Plan, evaluation: Evaluation) -> dict[str, Any]:
        found = plan.as_given(outcome.results, evaluation.per_token)
        return {'loss': outcome.loss, 'logps' if evaluation.head is None else evaluation.head.gives: found}

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            'loss_reduction': 'sum',
            'step': self._stepping.count,
            'gradient_accumulation_steps': 1,
            'call': self._calls,
        }
        if self.optimizer is not None:
            facts['lr'] = learning_rate(self.optimizer)
        if self._stepping.grad_norm is not None:
            facts['grad_norm'] = self._stepping.grad_norm
        return facts
