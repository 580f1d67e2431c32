# Makes a small model in place of a download.
export PYTHONPATH="$TESTS"
exec "$PYTHON" -c 'import sys, tiny_pipelines as tiny
tiny.sd3_pipeline(**tiny.clip_text()).save_pretrained(sys.argv[1])' "${@: -1}"
