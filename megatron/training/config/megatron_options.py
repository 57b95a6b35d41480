"""Options of Megatron-LM that are no options here: named as such, never taken for typos.

Two kinds. Unsupported: refused with the reason, unless the value given says that the feature is off. Satisfied: what they ask
for is what this project does anyway; accepted with a note, so that a Megatron command line can be pasted.
"""

import dataclasses
from collections.abc import Iterator, Mapping

_NULLS = ("null", "none", "~", "")


@dataclasses.dataclass(frozen=True)
class MegatronOption:
    """flag: Megatron's flag. name: its name in YAML files. reason: why it is refused, or why it is satisfied.

    satisfied: accepted with a note. values: the only values with which it is (None: any). off: further values that mean the
    feature is off, which is accepted in files.
    """

    flag: str
    name: str
    reason: str
    satisfied: bool = False
    values: tuple[str, ...] | None = None
    off: tuple[str, ...] = ()

    def verdict(self, values: list[str] | None) -> tuple[bool, str | None]:
        """(accepted, text of the problem or note) for the values it was given in a file or after the flag."""
        words = [value.strip().lower() for value in values or ()]
        said = f"{self.flag} {' '.join(values or ())}".strip()[:120]
        single = words[0] if len(words) == 1 else None
        if single in _NULLS or (not self.satisfied and single in ("false", *self.off)):
            return True, None
        if self.satisfied and (self.values is None or not words or all(word in self.values for word in words)):
            return True, f"Megatron option {self.flag} has no effect here: {self.reason}"
        return False, f"known Megatron option ({said}), not supported in this version: {self.reason}"


_UNSUPPORTED: Mapping[str, str] = {
    "tokens travel by moe_token_dispatcher_type alone, one collective after another": "moe-shared-expert-overlap moe-enable-deepep",
    "the router sees its tokens as they are": "moe-input-jitter-eps",
    "a capacity is set by moe_expert_capacity_factor": "moe-token-dropping",
    "expert_tensor_parallel_size cuts experts": "moe-extended-tp",
    "dense weights become experts by moe_use_upcycling; not in this version": "moe-use-upcycling",
    "fp8 and fp4 training is not supported": """
        fp8 fp8-format fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo fp8-recipe fp8-wgrad
        fp8-param-gather
        no-fp8-wgrad fp8-dot-product-attention fp8-multi-head-attention fp4-format
        keep-fp8-transpose-cache-when-using-custom-fsdp
        first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16""",
    "virtual_pipeline_model_parallel_size gives the number of model chunks per pipeline stage": """
        num-layers-per-virtual-pipeline-stage""",
    "pipeline_schedule=zb_h1 or zb_v leaves the weights' gradients for later": """
        defer-embedding-wgrad-compute wgrad-deferral-limit delay-wgrad-compute""",
    "the interleaved schedule passes as many microbatches through a chunk in turn as there are stages": """
        microbatch-group-size-per-virtual-pipeline-stage""",
    "there is no encoder beside the decoder, and this form of communication is not supported": """
        pipeline-model-parallel-split-rank cp-comm-type hierarchical-context-parallel-sizes tp-comm-overlap
        tp-comm-overlap-cfg tp-comm-bulk-wgrad tp-comm-bulk-dgrad tp-comm-overlap-ag tp-comm-overlap-rs tp-comm-split-ag
        tp-comm-split-rs tp-comm-bootstrap-backend encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size
        use-ring-exchange-p2p use-tp-pp-dp-mapping scatter-gather-tensors-in-pipeline high-priority-stream-groups
        nccl-communicator-config-path use-sharp sharp-enabled-group""",
    "optimizer state is sharded by use_distributed_optimizer (ZeRO stage 1) only": """
        use-torch-fsdp2 use-custom-fsdp use-megatron-fsdp data-parallel-sharding-strategy outer-dp-sharding-strategy
        torch-fsdp2-reshard-after-forward suggested-communication-unit-size""",
    "host memory of offloaded optimizer values is always pinned": "no-pin-cpu-grads no-pin-cpu-params",
    "activations are recomputed (recompute_granularity) or offloaded by layer (cpu_offloading), not split over ranks": """
        cpu-offloading-weights fine-grained-activation-offloading distribute-saved-activations checkpoint-activations""",
    "CUDA graphs are not supported; torch_compile is": """
        enable-cuda-graph external-cuda-graph cuda-graph-scope cuda-graph-num-warmup-steps cuda-graph-warmup-steps""",
    "checkpoints have one format, written by every rank and published atomically": """
        ckpt-format dist-ckpt-format use-dist-ckpt auto-detect-ckpt-format ckpt-convert-format ckpt-convert-save
        ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure dist-ckpt-strictness
        dist-ckpt-optim-fully-reshardable ckpt-convert-update-legacy-dist-opt-format load-model-opt-format""",
    "checkpoints are written by the training process itself": """
        async-save use-persistent-ckpt-worker async-strategy non-persistent-save-interval non-persistent-ckpt-type
        non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo replication
        replication-jump replication-factor""",
    "the whole configuration comes from files and flags; the run's own is <save>/config.yaml": """
        use-checkpoint-args use-mp-args-from-checkpoint-args use-checkpoint-opt_param-scheduler
        use-tokenizer-model-from-checkpoint-args""",
    "checkpoints are kept by save_interval and save_keep_last": """
        save-retain-interval checkpoint-steps phase-transition-iterations""",
    "multi-latent attention is not supported": """
        multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim rotary-scaling-factor mscale
        mscale-all-dim""",
    "multi-token prediction is not supported": "mtp-num-layers mtp-loss-scaling-factor",
    "only the decoder of a GPT is built": """
        encoder-num-layers encoder-seq-length decoder-num-layers decoder-seq-length spec is-hybrid-model
        hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern mamba-state-dim mamba-head-dim mamba-num-groups
        bert-load bert-no-binary-head mask-prob short-seq-prob vision-pretraining heterogeneous-layers-config-path
        retro-workdir retro-project-dir retro-add-retriever""",
    "this variant of the architecture is not supported": """
        apply-residual-connection-post-layernorm layernorm-zero-centered-gamma apply-layernorm-1p fp32-residual-connection
        apply-query-key-layer-scaling init-method init-method-xavier-uniform output-layer-init-method embedding-init-method-std
        gated-linear-unit openai-gelu onnx-safe glu-linear-offset rotary-seq-len-interpolation-factor no-rope-freq
        softmax-type add-position-embedding relative-attention-num-buckets relative-attention-max-distance
        window-attn-skip-freq attention-output-gate""",
    "the loss is computed in fp32 over all unmasked tokens": "fp16-lm-cross-entropy calculate-per-token-loss",
    "only next-token prediction is supported (objective)": """
        model-running-mode base-model mask-token attention-mask-type core-attn-implementation non-special-vocab-size
        cut-off-varlen-to-seqlen difflm-varilen-prob use-on-the-fly-eval fim-data fim-rate fim-spm-rate sft""",
    "the learning rate is set for embedding and output together (decoupled_lr) or for all": "head-lr-mult use-mup",
    "samples are read from .bin/.idx files": """
        dataloader-type per-split-data-args-path data-args-path s3-cache-path object-storage-cache-path
        dataloader-save vocab-extra-ids full-validation multiple-validation-sets""",
    "failures are not re-run; see nan_policy": """
        rerun-mode error-injection-rate error-injection-type check-for-spiky-loss check-for-large-grads iterations-to-skip
        result-rejected-tracker-filename inprocess-restart enable-ft-package calc-ft-timeouts grad-norm-skip-threshold""",
    "stragglers are not detected": """
        log-straggler disable-straggler-on-startup straggler-ctrlr-port straggler-minmax-count run-workload-inspector-server""",
    "the profiler is not built in; wrap the command in one": """
        profile profile-step-start profile-step-end profile-ranks use-pytorch-profiler record-memory-history
        memory-snapshot-path nvtx-ranges""",
    "logs are metrics.jsonl, the console, TensorBoard and Weights & Biases, with fixed contents": """
        log-progress log-world-size-to-tensorboard log-memory-to-tensorboard log-timers-to-tensorboard
        log-validation-ppl-to-tensorboard log-batch-size-to-tensorboard log-loss-scale-to-tensorboard
        tensorboard-queue-size one-logger-project one-logger-run-name one-logger-async app-tag-run-name app-tag-run-version
        timing-log-option logging-level log-num-zeros-in-param log-energy""",
    "inference options belong to tools/generate.py": """
        inference-batch-times-seqlen-threshold inference-max-requests inference-max-seq-length inference-dynamic-batching
        max-tokens-to-oom output-bert-embeddings""",
    "replicas are compared by checkpoint checksums": "check-weight-hash-across-dp-replicas-interval",
    "the exit signals are SIGTERM and SIGUSR1 (exit_signal_handler)": "exit-signal exit-signal-handler-for-dataloader",
    "gradients are reduced in the dtype that the optimizer reads; use main_grads_dtype=bf16": "grad-reduce-in-bf16",
    "buckets are set by ddp_bucket_size": "ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw",
    "distillation, quantisation and reinforcement learning are not supported": """
        export-kd-teacher-load export-kd-cfg export-quant-cfg perform-rl-step grpo-iterations""",
    "the vocabulary's padding follows make_vocab_size_divisible_by": "padded-vocab-size",
}

_SATISFIED: Mapping[str, str] = {
    "there is only one model code": "use-mcore-models",
    "cpu_offloading is about activations": "cpu-offloading-activations",
    "copies of optimizer_cpu_offload always overlap, from pinned memory, and the CPU's update is torch's": """
        overlap-cpu-optimizer-d2h-h2d use-torch-optimizer-for-cpu-offload pin-cpu-grads pin-cpu-params""",
    "fused kernels are chosen by the backend and do not change results": """
        no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-masked-softmax-fusion no-rope-fusion
        no-persist-layer-norm bias-gelu-fusion bias-swiglu-fusion bias-dropout-fusion
        bias-activation-fusion masked-softmax-fusion apply-rope-fusion persist-layer-norm
        memory-efficient-layer-norm cross-entropy-loss-fusion activation-func-fp8-input-store""",
    "masks are never made in the data loader": "no-create-attention-mask-in-dataloader create-attention-mask-in-dataloader",
    "throughput is always logged": "log-throughput log-learning-rate-to-tensorboard log-loss-to-tensorboard",
    "communication overlap needs no asynchronous flag": """
        no-async-tensor-model-parallel-allreduce async-tensor-model-parallel-allreduce""",
    "modules are initialised on their own device": "use-cpu-initialization lazy-mpu-init",
    "every rank reads its own data": "no-data-sharding",
    "rows are ordered by one gather": "moe-permute-fusion",
    "moe_grouped_gemm has one implementation": "moe-use-legacy-grouped-gemm",
    "scores are never scaled by the layer number": "no-query-key-layer-scaling",
}

# Satisfied only with these values, or off with them.
_VALUES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "transformer-impl": ("the model is this project's own code; kernels are chosen by attention_backend", ("local",)),
    "cross-entropy-fusion-impl": ("the loss has one implementation", ("native",)),
    "use-legacy-models": ("there is only one model code", ("false",)),
    "params-dtype": ("the dtype follows from fp16 and bf16", ("null", "none", "")),
    "autocast-dtype": ("the dtype follows from fp16 and bf16", ("null", "none", "")),
    "enable-autocast": ("the dtype follows from fp16 and bf16", ("false",)),
    "deallocate-pipeline-outputs": ("a stage's output is freed once it was sent", ("true",)),
    "perform-initialization": ("parameters are always initialised", ("true",)),
}
_OFF_VALUES: Mapping[str, tuple[str, ...]] = {
    "spec": ("[]",),
    "replication-factor": ("1",),
}


def _all() -> Iterator[MegatronOption]:
    for table, satisfied in ((_UNSUPPORTED, False), (_SATISFIED, True)):
        for reason, words in table.items():
            for word in words.split():
                yield MegatronOption(f"--{word}", word.replace("-", "_"), reason, satisfied, off=_OFF_VALUES.get(word, ()))
    for word, (reason, values) in _VALUES.items():
        yield MegatronOption(f"--{word}", word.replace("-", "_"), reason, True, values)


MEGATRON_BY_FLAG: Mapping[str, MegatronOption] = {option.flag: option for option in _all()}
MEGATRON_BY_NAME: Mapping[str, MegatronOption] = {option.name: option for option in _all()}
