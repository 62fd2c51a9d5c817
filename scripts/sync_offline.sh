#!/usr/bin/env bash
# Send the W&B runs that were logged offline, from a machine that has network and a key (`wandb login`).
#   scripts/sync_offline.sh [OUTPUT_DIR] [options of `wandb sync`]
# A run that was sent is marked, so that the same command sends only what is new.
set -euo pipefail

folder=outputs
if [[ $# -gt 0 && $1 != -* ]]; then
  folder=$1
  shift
fi
if [[ ! -d $folder ]]; then
  echo "$folder is not a folder: name the output_dir of the runs, such as outputs/" >&2
  exit 2
fi

failed=0 sent=0
while IFS= read -r -d '' run; do
  if compgen -G "$run/*.wandb.synced" >/dev/null; then
    continue
  fi
  if wandb sync "$@" "$run"; then
    sent=$((sent + 1))
  else
    echo "could not send $run" >&2
    failed=$((failed + 1))
  fi
done < <(find "$folder" -type d -name 'offline-run-*' -path '*/wandb/*' -print0 | sort -z)

echo "$sent runs sent, $failed not"
[[ $failed -eq 0 ]]
