#!/usr/bin/env bash
# From nothing to a trained, resumed, talking GPT: set-up, corpus, tokenizer, data, two-rank training with the distributed
# optimizer and all overlap on, a kill and a resume, a sample and a picture of the curve. Safe to run again: what is done is kept.
#   RUN=folder      where everything goes (default runs/quickstart)      QUICKSTART_FLAGS="..."  more flags for the training
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/_env.sh
setup_environment "plot"
export RUN="${RUN:-runs/quickstart}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
mkdir -p "$RUN/data"
CONFIG=configs/quickstart.yaml
read -r -a FLAGS <<<"${QUICKSTART_FLAGS:-}"
LAUNCH=(python -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py --config "$CONFIG")

step() { printf '\n== %s\n' "$*"; }

step "1/6  corpus"
[ -s "$RUN/data/corpus.jsonl" ] || python tools/make_corpus.py --source shakespeare --output "$RUN/data/corpus.jsonl"

step "2/6  tokenizer (SentencePiece with byte fallback, trained on the corpus)"
[ -s "$RUN/data/tokenizer.model" ] ||
    python tools/train_tokenizer.py --input "$RUN/data/corpus.jsonl" --output-prefix "$RUN/data/tokenizer" --vocab-size 1024

step "3/6  preprocessing to .bin/.idx"
[ -s "$RUN/data/corpus_text_document.idx" ] ||
    python tools/preprocess_data.py --input "$RUN/data/corpus.jsonl" --output-prefix "$RUN/data/corpus" \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$RUN/data/tokenizer.model" --append-eod --workers 2

step "4/6  training on 2 ranks: killed half-way, then resumed from its newest checkpoint"
POINTER="$RUN/checkpoints/latest_checkpointed_iteration.txt"
if [ ! -s "$POINTER" ]; then
    "${LAUNCH[@]}" "${FLAGS[@]}" 2>"$RUN/killed_run.stderr" &
    launcher=$!
    trap 'pkill -KILL -P $launcher 2>/dev/null; kill -KILL $launcher 2>/dev/null || true' EXIT
    while [ ! -s "$POINTER" ] && kill -0 $launcher 2>/dev/null; do sleep 0.5; done
    sleep 2 # some steps beyond the checkpoint, which the kill then loses
    if pkill -KILL -P $launcher; then # torchrun's children: the ranks
        wait $launcher 2>/dev/null || true
        echo "-- killed all ranks (SIGKILL); the newest complete checkpoint is iteration $(cat "$POINTER"). The same command resumes:"
    elif ! wait $launcher; then
        cat "$RUN/killed_run.stderr" >&2
        exit 1
    fi
    trap - EXIT
fi
"${LAUNCH[@]}" "${FLAGS[@]}"

step "5/6  how good is it"
python tools/count_tokens.py "$RUN/data/corpus_text_document" --entropy --json >"$RUN/data/statistics.json"
python tools/plot_metrics.py "$RUN/checkpoints/metrics.jsonl" --output "$RUN/loss.png" \
    --reference "unigram entropy" "$(python -c 'import json,sys; print(json.load(open(sys.argv[1]))["datasets"][0]["unigram_entropy_nats"])' "$RUN/data/statistics.json")"
python - "$RUN" <<'PY'
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
entropy = json.loads((run / "data/statistics.json").read_text())["datasets"][0]["unigram_entropy_nats"]
lines = [json.loads(line) for line in (run / "checkpoints/metrics.jsonl").read_text().splitlines()]
loss = [line["lm_loss"] for line in lines if line.get("split") == "validation"][-1]
print(f"validation loss {loss:.3f} nats per token; a model that only knew word frequencies would have {entropy:.3f} (unigram entropy)")
PY

step "6/6  a sample"
python tools/generate.py --load "$RUN/checkpoints" --prompt "KING HENRY." --max-new-tokens 160 --temperature 0.7 --top-k 40 --seed 2 --stream

cat <<END

Checkpoint  $RUN/checkpoints        metrics  $RUN/checkpoints/metrics.jsonl
Curve       $RUN/loss.png           TensorBoard  tensorboard --logdir $RUN/tensorboard
Where next:
  your own text     python tools/preprocess_data.py --help, then --data-path in a copy of $CONFIG
  another model     configs/ (gpt2.yaml, ...), every option in docs/config_reference.md
  how it works      docs/tutorial.md, docs/distributed_optimizer.md
END
