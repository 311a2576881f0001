# One verb each; the work is in scripts/, which CI uses too.
.PHONY: help run test check bench fuzz soak docs clean faults

help:
	@echo "make run     the demo on 127.0.0.1:8080 (makes .venv first; Ctrl-C stops it)"
	@echo "make test    all tests, on the engines that are installed"
	@echo "make check   lint, format, types, import direction, generated pages"
	@echo "make bench   the benchmarks"
	@echo "make fuzz    100,000 broken requests to a router on a fake engine (about half an hour)"
	@echo "make faults  every fault of engines and launcher 20 times, and each alert by a real fault;"
	@echo "             in parts with SELECT='-k \"stock and saving\"', WARMSLOT_FAULTS=3 for fewer times"
	@echo "make soak    64 clients on each real engine for five minutes, with leaving and a kill"
	@echo "make docs    write the generated pages again"
	@echo "make clean   remove .venv, build/ and caches"

run:
	@scripts/venv demo
	@exec .venv/bin/warmslot up configs/demo.yaml --quiet

test:
	@scripts/test

check:
	@scripts/check

bench:
	@scripts/bench

fuzz:
	@WARMSLOT_FUZZ=100000 scripts/test -q tests/fuzz

soak:
	@WARMSLOT_SOAK=300 scripts/test -q tests/e2e/test_load.py

docs:
	@scripts/venv demo test
	@scripts/docs

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info

faults:
	@scripts/venv demo test
	@WARMSLOT_FAULTS=$${WARMSLOT_FAULTS:-20} scripts/test -m faults tests/engine/test_faults.py tests/e2e/test_faults.py tests/dashboards/test_faults.py $(SELECT)
