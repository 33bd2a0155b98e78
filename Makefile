# nmkgen: one Makefile for the generator, every model in specs/, and the tests.
#
#   make         build/nmkgen, for every specs/MODEL.yaml what it emits, and the programs of the toy and North Mini Code;
#                others on demand: make build/llama-3.2-1b/nmk-serve
#   make demo    set up, build the toy model, serve it and ask it
#   make test    set up, build everything, run the tests; the last line is the count
#   make golden  rewrite tests/golden (read the diff)
#   make gpu     what tests/gpu/run and the benchmarks need on a machine with a GPU; make test-gpu runs the tests too
#   make test-page   the page at / of nmk-serve in a headless Chromium, which it installs
#   make conformance   clients that others make, of npm, against nmk-serve with scripted answers; needs Node.js and npm
#   make test-balancer   three servers behind HAProxy, which it installs
#   make load    nmk-serve with the toy on the CPU under load: CLIENTS=200 SECONDS=600
#   make test-asan   the tests of server and runtime under ASan and UBSan; make test-tsan: under TSan
#   make fuzz    fuzzers under ASan and UBSan, each a minute: TARGET="json regex" SECONDS=3600 SEED=2
#   make schemas documents of random schemas, judged by python3-jsonschema: SCHEMAS=10000 SEED=1
#   make models  kernels of models that specs/ does not have compile, for every kind of launch
#   make test-op OP=NAME   the tests in templates/ops/NAME.cu, on the CPU machine; and the kernel compiled where NVRTC is
#   make lint    luacheck, clang-format
#   make bench   the benchmarks alone
#   make deps    install the Debian packages that are missing; make deps-build: without those of tests and demo
#   make clean   remove build/

# What `nmkgen tune` found lies beside a model and is none.
MODELS := $(patsubst specs/%.yaml,%,$(filter-out %.tuning.yaml,$(wildcard specs/*.yaml)))
# Those whose programs a bare `make` builds; of the others it makes what nmkgen emits.
BUILT  := nmc-toy north-mini-code
# Models that only tests on a GPU use; not part of `make`.
GPU_MODELS := $(patsubst tests/gpu/specs/%.yaml,%,$(filter-out %.tuning.yaml,$(wildcard tests/gpu/specs/*.yaml)))
# Random checkpoints with what transformers computes on them.
TINY_MODELS := $(patsubst tests/models/%.yaml,%,$(wildcard tests/models/*.yaml))
# GPU_MODELS that every `make test` looks at: shapes of attention that no shipped model has.
SHAPES := $(filter chain-% heads-% normed-%,$(GPU_MODELS))
TOY    := nmc-toy
# make test-op OP=NAME: the toy with the op inserted as its file says.
OP_MODEL := $(if $(OP),op-$(OP))

# Columns of which a model's programs have steps beside those of the spec itself, for --max-batch.  A spec in specs/
# that says schedule.columns has no others, nor have models that only tests use.
COLUMNS := 16 32 64
$(TOY)_COLUMNS := 16
OWN_COLUMNS := $(patsubst specs/%.yaml,%,$(shell grep -lE '^ +columns:' specs/*.yaml))
columns_of = $(if $(filter $(filter-out $(OWN_COLUMNS),$(MODELS)),$(1)),$(or $($(1)_COLUMNS),$(COLUMNS)))

# Models whose programs take prompts by launches of their own: those in specs/ and the tiny ones, but where the spec
# forbids it or inserts ops, which such launches lack, and those of tests/gpu/specs that ask for it.
ASKING := $(shell grep -lE '^prefill:' tests/gpu/specs/*.yaml)
STEPPING := $(shell grep -lE '^ +tokens: 0$$|^insert:' specs/*.yaml)
PREFILLED := $(filter-out $(STEPPING:specs/%.yaml=%),$(MODELS)) $(TINY_MODELS) $(ASKING:tests/gpu/specs/%.yaml=%)
prefill_of = $(filter $(PREFILLED),$(1))

BUILD_PACKAGES := gcc binutils libc6-dev make lua5.4 liblua5.4-dev libyaml-dev libjson-c-dev libpcre2-dev libxxhash-dev libutf8proc-dev \
    node-llhttp
TEST_PACKAGES  := lua-check clang-format python3-jsonschema
# For the example client; either flavour of libcurl's headers will do, and they exclude each other.
DEMO_PACKAGES  := curl $(if $(wildcard /usr/include/curl/curl.h /usr/include/*/curl/curl.h),,libcurl4-openssl-dev)

CC       := gcc
CFLAGS   := -std=gnu11 -O2 -g
WARNINGS := -Wall -Wextra -Wshadow -Werror
DEPFLAGS  = -MMD -MP
# The C that nmkgen emits is what the machine without a GPU spends its time in.
REFVM_FLAGS := -O3 -ffp-contract=off

GEN_LIBS := -l:liblua5.4.a -l:libyaml.a -lm -ldl
RUN_LIBS := -l:libjson-c.a -l:libpcre2-8.a -l:libxxhash.a -l:libutf8proc.a -ldl -lpthread -lm

.DELETE_ON_ERROR:
.SUFFIXES:
.SECONDARY:
.PHONY: all demo test load schemas golden lint clean deps deps-build deps-demo build-demo build-test always

all:

# ---------------------------------------------------------------- packages

# $(call install,PACKAGES): installs those that are missing, touches nothing otherwise.
define install
@if ! command -v dpkg-query >/dev/null; then \
    echo "not a Debian system: make sure that you have what these packages hold: $(1)"; exit 0; fi; \
missing=; for p in $(1); do \
    [ "$$(dpkg-query -W -f='$${db:Status-Status}' $$p 2>/dev/null)" = installed ] || missing="$$missing $$p"; done; \
[ -n "$$missing" ] || exit 0; \
sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
echo "installing:$$missing"; \
export DEBIAN_FRONTEND=noninteractive; \
apt() { log=$$($$sudo apt-get -q -o DPkg::Lock::Timeout=300 "$$@" </dev/null 2>&1) || { echo "$$log"; exit 1; }; }; \
apt update; apt install -y --no-install-recommends $$missing
endef

deps: ; $(call install,$(BUILD_PACKAGES) $(DEMO_PACKAGES) $(TEST_PACKAGES))
deps-demo: ; $(call install,$(BUILD_PACKAGES) $(DEMO_PACKAGES))
deps-build: ; $(call install,$(BUILD_PACKAGES))

# ---------------------------------------------------------------- what a user types

# make demo and make test use all cores unless told otherwise.
SUBMAKE = $(MAKE) --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc))

.PHONY: test-balancer
test-balancer: deps
	$(call install,haproxy)
	@$(SUBMAKE) build/$(TOY)/nmk-serve build/nmk-bench
	@bash tests/server/balancer.sh

# A browser is large, so only this installs one; where there is one `make test` uses it too.
.PHONY: test-page
test-page: deps
	$(call install,chromium-headless-shell)
	@$(SUBMAKE) build/$(TOY)/nmk-serve build/tests/$(TOY)/server/serve_page
	@build/tests/$(TOY)/server/serve_page

demo: deps-demo
	@$(SUBMAKE) build-demo
	@bash tests/demo.sh show

test: deps
	@$(SUBMAKE) build-test
	@tests/run

CLIENTS := 200
SECONDS := 600
load: deps-build
	@$(SUBMAKE) build/$(TOY)/nmk-serve build/tests/$(TOY)/server/load
	@build/tests/$(TOY)/server/load --clients $(CLIENTS) --seconds $(SECONDS)

SCHEMAS := 10000
SEED := 1
schemas: deps
	@$(SUBMAKE) build/tests/$(TOY)/server/grammar_masks
	@NMK_SCHEMAS=$(SCHEMAS) NMK_SCHEMAS_SEED=$(SEED) bash tests/server/grammar_documents.sh

# Each for a minute, unless SECONDS is said; as many at a time as there are cores.
.PHONY: fuzz
fuzz: deps-build
	@$(SUBMAKE) build/fuzz/fuzz
	@NMK_FUZZ_SECONDS=$(if $(filter file,$(origin SECONDS)),60,$(SECONDS)) NMK_FUZZ_JOBS=$$(nproc) NMK_FUZZ_SEED=$(SEED) \
	    bash tests/fuzz/timing_fuzz.sh $(TARGET)

.PHONY: models
models: deps
	@$(SUBMAKE) build/nmkgen build/$(TOY)/nmk-compile
	@NMK_MODELS=all bash tests/sass/models.sh

golden: deps
	@$(SUBMAKE) build/nmkgen $(MODELS:%=build/%/.generated)
	@for t in $(sort $(wildcard tests/golden/*.lua)); do NMK_GOLDEN=write lua5.4 $$t || exit 1; done

lint: deps
	@bash tests/lint.sh

clean:
	rm -rf build

# ---------------------------------------------------------------- the generator

GEN_OBJECTS := $(patsubst gen/%.c,build/gen/%.o,$(wildcard gen/*.c))
# Everything that decides what is emitted.
GEN_INPUTS := build/nmkgen $(shell find gen/ templates/ specs/ -name '*.lua' -o -name '*.yaml' -o -name '*.cu' -o -name '*.cuh' \
    -o -path 'templates/*.[ch]')

all: build/nmkgen build/nmk-bench
build/nmkgen: $(GEN_OBJECTS)
	@echo "  link  $@"
	@$(CC) $(LDFLAGS) -o $@ $^ $(GEN_LIBS)

build/gen/%.o: gen/%.c
	@mkdir -p $(@D)
	@echo "  cc    $<"
	@$(CC) $(CFLAGS) $(WARNINGS) $(DEPFLAGS) -I/usr/include/lua5.4 -c -o $@ $<

# ---------------------------------------------------------------- the server's HTTP

# llhttp comes as C in Debian's node-llhttp, for nobody but us to compile.
LLHTTP := /usr/share/llhttp
HTTP_OBJECTS := $(patsubst server/%.c,build/server/%.o,$(wildcard server/http*.c)) \
    $(addprefix build/server/llhttp/,api.o http.o llhttp.o)
HTTP_COMPILE = $(CC) $(CFLAGS) $(DEPFLAGS) -isystem /usr/share/include/llhttp -isystem /usr/include/lua5.4
SERVER_LIBS := -l:liblua5.4.a

build/libhttp.a: $(HTTP_OBJECTS)
	@rm -f $@
	@ar rcs $@ $^

build/server/http%.o: server/http%.c
	@mkdir -p $(@D)
	@echo "  cc    $<"
	@$(HTTP_COMPILE) $(WARNINGS) -Iruntime -c -o $@ $<

# Compiled for each model, as they know its sizes: part of build/MODEL/libnmk.a.
SERVER_MODEL := server/batch.c server/pace.c server/tasks.c

# The rest of the server: requests, replies, what the model says, templates.
build/libserver.a: $(patsubst server/%.c,build/server/%.o,$(filter-out server/http%.c server/main.c $(SERVER_MODEL), \
    $(wildcard server/*.c)))
	@rm -f $@
	@ar rcs $@ $^

build/server/%.o: server/%.c
	@mkdir -p $(@D)
	@echo "  cc    $<"
	@$(HTTP_COMPILE) $(WARNINGS) -Iruntime -c -o $@ $<

# The compiler of chat templates is part of the program.
build/server/template.o: server/jinja.lua server/jinja_lib.lua
# So is the page.
build/server/page.o: server/page.html

build/server/llhttp/%.o: $(LLHTTP)/%.c
	@mkdir -p $(@D)
	@echo "  cc    $<"
	@$(HTTP_COMPILE) -DLLHTTP_STRICT_MODE=1 -c -o $@ $<

# ---------------------------------------------------------------- the example client

build/nmk-chat: examples/chat/chat.c
	@mkdir -p $(@D)
	@echo "  cc    $<"
	@$(CC) $(CFLAGS) $(WARNINGS) $(LDFLAGS) -o $@ $< -lcurl -l:libjson-c.a

# ---------------------------------------------------------------- load on any server

BENCH_OBJECTS := $(patsubst %.c,build/bench/%.o,$(wildcard bench/*.c) runtime/util.c runtime/json.c runtime/utf8.c runtime/flags.c)

build/nmk-bench: $(BENCH_OBJECTS)
	@echo "  link  $@"
	@$(CC) $(LDFLAGS) -o $@ $^ -l:libjson-c.a -l:libutf8proc.a -lm

build/bench/%.o: %.c
	@mkdir -p $(@D)
	@echo "  cc    $<"
	@$(CC) $(CFLAGS) $(WARNINGS) $(DEPFLAGS) -Iruntime -c -o $@ $<

# ---------------------------------------------------------------- a model

# Files of runtime/ with a main, and the program each becomes; those that are compiled for each generation.
PROGRAMS := run compile
GENERATION := generation built_in kernel_source
LIBRARY  := $(filter-out $(PROGRAMS:%=runtime/%.c) $(GENERATION:%=runtime/%.c),$(wildcard runtime/*.c))

# A root with a family for tests alone, of the models normed-*.
TEST_ROOT := build/tests/root
$(TEST_ROOT)/.made: tests/gpu/specs/family.lua $(wildcard specs/families/*.lua specs/families/lib/*.lua specs/targets/*.yaml)
	@rm -rf $(@D); mkdir -p $(@D)/specs/families
	@ln -s $(CURDIR)/gen $(CURDIR)/templates $(@D); ln -s $(CURDIR)/specs/targets $(@D)/specs
	@ln -s $(CURDIR)/specs/families/lib $(@D)/specs/families
	@lua5.4 tests/gpu/specs/family.lua $(@D)/specs/families
	@touch $@

# What nmkgen writes.  A file that comes out as it was keeps its time, so that nothing is compiled again for it.
EMITTED := megakernel.cu abi.h encoder.c refvm.c op_tests.h plan.txt

# $(call generation,M,FOLDER,SYMBOL,SPEC,FLAGS): build/FOLDER/ = what nmkgen emits for one of M's generations, and the
# objects that know its abi.h.  SYMBOL: its nmk_generation.
define generation
build/$(2)/.generated: $(or $(4),$(wildcard specs/$(1).yaml tests/gpu/specs/$(1).yaml tests/models/$(1).yaml)) \
    $(GEN_INPUTS) \
    $(if $(filter normed-%,$(1)),$(TEST_ROOT)/.made)
	@mkdir -p $$(@D)
	@echo "  nmkgen $$<$(if $(5), $(5))"
	@mkdir -p build/$(2)/.old; cp -p $(EMITTED:%=build/$(2)/%) build/$(2)/.old 2>/dev/null || true
	@$(if $(filter normed-%,$(1)),NMK_ROOT=$(TEST_ROOT)) build/nmkgen $$< $(5) -o build/$(2)
	@cd build/$(2) && for f in $(EMITTED); do ! cmp -s .old/$$$$f $$$$f || mv .old/$$$$f $$$$f; done
	@touch $$@

$(EMITTED:%=build/$(2)/%): build/$(2)/.generated ;

$(2)_COMPILE = $(CC) $(CFLAGS) $(WARNINGS) $(DEPFLAGS) -Ibuild/$(2) -Iruntime -Itests \
    -DNMK_MODEL='"$(1)"' -DNMK_KERNEL_PATH='"build/$(2)/megakernel.cu"'

build/$(2)/obj/%.o: runtime/%.c | build/$(2)/.generated
	@mkdir -p $$(@D)
	@echo "  cc    $$< ($(2))"
	@$$($(2)_COMPILE) -c -o $$@ $$<

build/$(2)/obj/%.o: build/$(2)/%.c
	@mkdir -p $$(@D)
	@echo "  cc    $$<"
	@$$($(2)_COMPILE) $(REFVM_FLAGS) -c -o $$@ $$<

# The kernel's text is part of the program.
build/$(2)/obj/kernel_source.o: build/$(2)/megakernel.cu

build/$(2)/obj/generation.o: $(2)_COMPILE += -DNMK_GENERATION=$(3)

$(2)_OBJECTS := $(patsubst %,build/$(2)/obj/%.o,encoder refvm $(GENERATION))
endef

# $(call further,M,FOLDER,SYMBOL): one object of a generation, in which nobody else sees more than SYMBOL.
define further
build/$(2)/$(3).o: $$($(2)_OBJECTS)
	@ld -r -o $$@ $$^
	@objcopy --keep-global-symbol=$(3) $$@
endef

# $(call model,M,SPEC,FLAGS): build/M/ = what nmkgen emits + libnmk.a + nmk-run, nmk-compile, nmk-serve + bench-*.
define model
$(call generation,$(1),$(1),nmk_generation_own,$(2),$(3))
$(foreach c,$(call columns_of,$(1)),
$(call generation,$(1),$(1)/columns-$(c),nmk_generation_$(c),$(2),$(3) --set columns=$(c))
$(call further,$(1),$(1)/columns-$(c),nmk_generation_$(c)))
$(if $(call prefill_of,$(1)),
$(call generation,$(1),$(1)/prefill,nmk_generation_prefill,$(2),$(3) --launch prefill)
$(call further,$(1),$(1)/prefill,nmk_generation_prefill))

build/$(1)/obj/server/%.o: server/%.c | build/$(1)/.generated
	@mkdir -p $$(@D)
	@echo "  cc    $$< ($(1))"
	@$$($(1)_COMPILE) -c -o $$@ $$<

# The list of generations, which the command line may change.
build/$(1)/.columns: always
	@mkdir -p $$(@D)
	@echo "$(call columns_of,$(1)) $(call prefill_of,$(1))" | cmp -s - $$@ || \
	    echo "$(call columns_of,$(1)) $(call prefill_of,$(1))" >$$@
build/$(1)/obj/generations.o: build/$(1)/.columns
build/$(1)/obj/generations.o: $(1)_COMPILE += \
    -DNMK_GENERATIONS='X(nmk_generation_own) $(foreach c,$(call columns_of,$(1)),X(nmk_generation_$(c)))' \
    $(if $(call prefill_of,$(1)),-DNMK_PREFILL=nmk_generation_prefill)

build/$(1)/libnmk.a: $(LIBRARY:runtime/%.c=build/$(1)/obj/%.o) $(SERVER_MODEL:%.c=build/$(1)/obj/%.o) \
    $(patsubst %,build/$(1)/obj/%.o,encoder refvm $(GENERATION)) \
    $(foreach c,$(call columns_of,$(1)),build/$(1)/columns-$(c)/nmk_generation_$(c).o) \
    $(if $(call prefill_of,$(1)),build/$(1)/prefill/nmk_generation_prefill.o)
	@rm -f $$@
	@ar rcs $$@ $$^

build/$(1)/nmk-%: build/$(1)/obj/%.o build/$(1)/libnmk.a
	@echo "  link  $$@"
	@$(CC) $(LDFLAGS) -o $$@ $$^ $(RUN_LIBS)

build/$(1)/nmk-serve: build/$(1)/obj/server/main.o build/libserver.a build/libhttp.a build/$(1)/libnmk.a
	@echo "  link  $$@"
	@$(CC) $(LDFLAGS) -o $$@ $$^ $(SERVER_LIBS) $(RUN_LIBS)

build/$(1)/bench-%: build/$(1)/tests/bench/%.o build/$(1)/libnmk.a
	@echo "  link  $$@"
	@$(CC) $(LDFLAGS) -o $$@ $$^ $(RUN_LIBS)

# Their client is nmk-bench's.
build/$(1)/bench-serve build/$(1)/bench-prompts: build/bench/bench/sse.o
build/$(1)/bench-prompts: build/bench/bench/load.o
build/$(1)/tests/bench/%.o: $(1)_COMPILE += -Ibench

# The one that has parts of the server in it.
build/$(1)/tests/bench/constrained.o: $(1)_COMPILE += -Iserver
build/$(1)/bench-constrained: build/$(1)/tests/bench/constrained.o build/libserver.a build/$(1)/libnmk.a
	@echo "  link  $$@"
	@$(CC) $(LDFLAGS) -o $$@ $$^ $(RUN_LIBS)

build/$(1)/tests/%.o: tests/%.c | build/$(1)/.generated
	@mkdir -p $$(@D)
	@echo "  cc    $$< ($(1))"
	@$$($(1)_COMPILE) -c -o $$@ $$<

build/tests/$(1)/server/http_%: build/$(1)/tests/server/http_%.o build/libhttp.a build/$(1)/libnmk.a
	@mkdir -p $$(@D)
	@echo "  link  $$@"
	@$(CC) $(LDFLAGS) -o $$@ $$^ $(SERVER_LIBS) $(RUN_LIBS)

build/tests/$(1)/server/serve_%: build/$(1)/tests/server/serve_%.o build/libserver.a build/libhttp.a build/$(1)/libnmk.a
	@mkdir -p $$(@D)
	@echo "  link  $$@"
	@$(CC) $(LDFLAGS) -o $$@ $$^ $(SERVER_LIBS) $(RUN_LIBS)

build/tests/$(1)/server/%: build/$(1)/tests/server/%.o build/libserver.a build/$(1)/libnmk.a
	@mkdir -p $$(@D)
	@echo "  link  $$@"
	@$(CC) $(LDFLAGS) -o $$@ $$^ $(SERVER_LIBS) $(RUN_LIBS)

build/$(1)/tests/server/%.o: $(1)_COMPILE += -Iserver -isystem /usr/share/include/llhttp

build/tests/$(1)/%: build/$(1)/tests/%.o build/$(1)/libnmk.a
	@mkdir -p $$(@D)
	@echo "  link  $$@"
	@$(CC) $(LDFLAGS) -o $$@ $$^ $(RUN_LIBS)

# These have the CPU machine in themselves, and of the runtime they need next to nothing.
$(patsubst %,build/tests/$(1)/ops/%,cases attention): build/tests/$(1)/ops/%: build/$(1)/tests/ops/%.o \
    $(patsubst %,build/$(1)/obj/%.o,encoder built_in util)
	@mkdir -p $$(@D)
	@echo "  link  $$@"
	@$(CC) $(LDFLAGS) -o $$@ $$^ -lpthread -lm

$(if $(call prefill_of,$(1)),
build/$(1)/prefill/tests/ops/%.o: tests/ops/%.c | build/$(1)/prefill/.generated
	@mkdir -p $$(@D)
	@echo "  cc    $$< ($(1)/prefill)"
	@$$($(1)/prefill_COMPILE) -c -o $$@ $$<

build/tests/$(1)/prefill/cases: build/$(1)/prefill/tests/ops/cases.o build/$(1)/obj/util.o \
    $(patsubst %,build/$(1)/prefill/obj/%.o,encoder built_in)
	@mkdir -p $$(@D)
	@echo "  link  $$@"
	@$(CC) $(LDFLAGS) -o $$@ $$^ -lpthread -lm)

$(1)_PROGRAMS := $(foreach p,$(PROGRAMS),$(if $(wildcard runtime/$(p).c),build/$(1)/nmk-$(p))) build/$(1)/nmk-serve
$(1)_BENCH    := $(patsubst tests/bench/%.c,build/$(1)/bench-%,$(wildcard tests/bench/*.c))
$(1)_GPU      := $(patsubst tests/%.c,build/tests/$(1)/%,$(wildcard tests/gpu/*.c))
endef

# What a bare `make`, and `make test`, build of a model in BUILT.
define shipped
all: $$($(1)_PROGRAMS)
bench: $$($(1)_BENCH)
build-test: $$($(1)_PROGRAMS) $$($(1)_BENCH) $$($(1)_GPU)
endef

$(foreach m,$(MODELS) $(GPU_MODELS) $(TINY_MODELS),$(eval $(call model,$(m))))
$(foreach m,$(BUILT),$(eval $(call shipped,$(m))))
all: $(MODELS:%=build/%/.generated)

# ---------------------------------------------------------------- clients that others make

# The toy with room for the prompts that agents send; its tokens are scripted, so its weights do not matter.
CONFORMANCE := build/conformance
CLIENTS_NPM := openai @anthropic-ai/sdk ai @ai-sdk/openai-compatible zod opencode-ai

$(CONFORMANCE)/scripted.yaml: specs/$(TOY).yaml
	@mkdir -p $(@D)
	@sed 's/^model: .*/model: scripted/; s/^  max_context: .*/  max_context: 131072/' $< >$@

$(eval $(call model,scripted,$(CONFORMANCE)/scripted.yaml))

$(CONFORMANCE)/checkpoint/config.json: examples/$(TOY)/config.json
	@mkdir -p $(@D)
	@cp examples/$(TOY)/*token*.json examples/$(TOY)/generation_config.json examples/$(TOY)/chat_template.jinja $(@D)
	@sed 's/"max_position_embeddings": [0-9]*/"max_position_embeddings": 131072/' $< >$@

build/scripted/tests/conformance/%.o: scripted_COMPILE += -Iserver
$(CONFORMANCE)/serve: build/scripted/tests/conformance/scripted.o build/libserver.a build/libhttp.a build/scripted/libnmk.a
	@mkdir -p $(@D)
	@echo "  link  $@"
	@$(CC) $(LDFLAGS) -o $@ $^ $(SERVER_LIBS) $(RUN_LIBS)

# What they are today: nothing is pinned, and nothing of them is kept in the tree.
.PHONY: conformance
conformance: deps-build
	@command -v npm >/dev/null || { echo "make conformance needs Node.js, from 20.11 on, and npm"; exit 1; }
	@$(SUBMAKE) $(CONFORMANCE)/serve $(CONFORMANCE)/checkpoint/config.json
	@npm install --prefix $(CONFORMANCE) --no-audit --no-fund --no-package-lock --loglevel=error $(CLIENTS_NPM)
	@cp tests/conformance/*.mjs $(CONFORMANCE) && node $(CONFORMANCE)/clients.mjs

build/$(TOY)/tests/models/%.o: $(TOY)_COMPILE += -DCHECKPOINT='"examples/$(TOY)"'
TINY_TESTS := $(TINY_MODELS:%=build/tests/%/models/golden) $(TINY_MODELS:%=build/tests/%/models/prefill) \
    build/tests/$(TOY)/models/prefill build/tests/$(TOY)/prefill/cases
$(foreach m,$(OP_MODEL),$(eval $(call model,$(m),specs/$(TOY).yaml,--try $(OP))))

.PHONY: test-op
test-op: $(if $(OP),build/tests/$(OP_MODEL)/ops/cases build/$(TOY)/nmk-compile)
	@$(if $(OP),,echo "make test-op OP=NAME: which op?"; exit 2)
	@build/tests/$(OP_MODEL)/ops/cases $(OP)
	@log=build/$(OP_MODEL)/compile.log; \
	if build/$(TOY)/nmk-compile build/$(OP_MODEL)/megakernel.cu >$$log 2>&1; then \
	    echo "ok - op $(OP): the kernel compiles: $$(grep -o '[0-9]* registers, spills [0-9]* bytes' $$log)"; \
	elif grep -q libnvrtc $$log; then echo "skip - op $(OP): the kernel compiles: no NVRTC"; \
	else cat $$log; echo "not ok - op $(OP): the kernel compiles"; exit 1; fi

# Everything that runs on the machine with the GPU.
.PHONY: gpu test-gpu
test-gpu: gpu
	@tests/gpu/run

gpu: build/nmk-bench $(foreach m,$(BUILT) $(GPU_MODELS),$($(m)_PROGRAMS) $($(m)_BENCH) $($(m)_GPU)) $(TINY_TESTS) \
    build/tests/$(TOY)/server/load build/tests/north-mini-code/runtime/load_memory

.PHONY: bench
bench:

# ---------------------------------------------------------------- fuzzers

# What reads input of others, under ASan and UBSan, with a call at the start of every block for the corpus; of the toy.
# What it calls beside that comes from the toy's library as it is.
FUZZ_FLAGS := -O1 -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
FUZZED := $(filter-out server/main.c $(SERVER_MODEL),$(wildcard server/*.c)) \
    $(patsubst %,runtime/%.c,config json split tokenizer tokenizer_load utf8 util variant vocab weights)
FUZZERS := $(wildcard tests/fuzz/*.c)

build/fuzz/fuzz: $(patsubst %.c,build/fuzz/obj/%.o,$(FUZZED) $(FUZZERS)) build/server/llhttp/api.o build/server/llhttp/http.o \
    build/server/llhttp/llhttp.o build/$(TOY)/libnmk.a
	@echo "  link  $@"
	@$(CC) $(FUZZ_FLAGS) $(LDFLAGS) -o $@ $^ $(SERVER_LIBS) -l:libyaml.a $(RUN_LIBS)

FUZZ_COMPILE = $(CC) $(CFLAGS) $(FUZZ_FLAGS) $(WARNINGS) $(DEPFLAGS) -isystem /usr/share/include/llhttp -isystem /usr/include/lua5.4 \
    -Ibuild/$(TOY) -Iruntime -Iserver -Itests
# Warnings are for the other build: with sanitizers there are more of them, and fewer are right.
build/fuzz/obj/%.o: %.c | build/$(TOY)/.generated
	@mkdir -p $(@D)
	@echo "  cc    $< (fuzz)"
	@$(FUZZ_COMPILE) -w -fsanitize-coverage=trace-pc -c -o $@ $<

build/fuzz/obj/tests/fuzz/%.o: tests/fuzz/%.c | build/$(TOY)/.generated
	@mkdir -p $(@D)
	@echo "  cc    $<"
	@$(FUZZ_COMPILE) -c -o $@ $<
build/fuzz/obj/server/template.o: server/jinja.lua server/jinja_lib.lua
build/fuzz/obj/server/page.o: server/page.html

# ---------------------------------------------------------------- tests

# Tests in C run on the toy; those in tests/gpu are built for every model and skip themselves without a GPU.
C_TESTS := $(patsubst tests/%.c,build/tests/$(TOY)/%,$(wildcard tests/runtime/*.c tests/ops/*.c tests/server/*.c \
    tests/readme/*.c))

# The same in a tree of its own below build/, which shares all but build/: make test-asan, make test-tsan.  What nmkgen
# emits stays as it is: it has tests of its own, and what it computes would take most of the time.
SANITIZED := $(filter $(patsubst %,build/tests/$(TOY)/%/%,server runtime),$(C_TESTS))
# Of the shell tests those that run the toy's programs; the others are of North Mini Code, which takes minutes to compile
# so, of HAProxy, of the generator and of kernels.
SANITIZED_SHELL := $(patsubst %,tests/%.sh,server/serve_flags server/bench_prompts server/grammar_documents \
    runtime/run_flags runtime/run_cpu runtime/variant)
SANITIZER_asan := -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
SANITIZER_tsan := -fsanitize=thread
# NMK_SLOW: how many times as long as otherwise a test waits, and what it judges by time may take.
SLOW_asan := 5
SLOW_tsan := 10
# Tests of threads, memory and input that take seconds with ASan: what every `make test` has of it, tests/server/asan.sh.
ASAN_TESTS := $(patsubst %,build/tests/$(TOY)/%,server/batch_fake_gpu server/batch_chunks server/serve_responses \
    server/serve_messages server/reply_bodies runtime/engine_fake_gpu runtime/kv_pages runtime/weights_open \
    runtime/weights_pack)

build/asan/Makefile build/tsan/Makefile:
	@mkdir -p $(@D)
	@for f in *; do [ $$f = build ] || ln -sfn ../../$$f $(@D)/$$f; done

# $(call sanitized,asan,TARGETS)
sanitized = $(MAKE) --no-print-directory -C build/$(1) CFLAGS="-std=gnu11 -O1 -g -fno-omit-frame-pointer $(SANITIZER_$(1))" \
    LDFLAGS="$(SANITIZER_$(1))" WARNINGS=-w REFVM_FLAGS="$(REFVM_FLAGS) -fno-sanitize=all" $(2)

.PHONY: build-asan build-tsan build-asan-tests test-asan test-tsan
build-tsan: build/nmkgen build/nmk-chat build/nmk-bench build/$(TOY)/bench-prompts $($(TOY)_PROGRAMS) $(SANITIZED)
# Loading and running the other families: nothing of that is done by several threads.
build-asan: build-tsan $(TINY_TESTS)
build-asan-tests: build/asan/Makefile build/nmkgen
	@+$(call sanitized,asan,$(ASAN_TESTS))
	@printf '%s\n' $(ASAN_TESTS) >build/asan/build/quick
	@echo $(SLOW_asan) >build/asan/build/slow

# $(call test_sanitized,asan,MORE WORDS)
define test_sanitized
@+$(call sanitized,$(1),$(if $(filter -j%,$(MAKEFLAGS)),,-j$$(nproc)) build-$(1))
@NMK_TEST_SECONDS=1800 NMK_SLOW=$(or $(NMK_SLOW),$(SLOW_$(1))) build/$(1)/tests/run \
    $(TOY)/server $(TOY)/runtime $(SANITIZED_SHELL) $(2)
endef
test-asan: deps build/asan/Makefile ; $(call test_sanitized,asan,/models/ $(TOY)/prefill)
test-tsan: deps build/tsan/Makefile ; $(call test_sanitized,tsan)

build-demo: build/nmkgen build/$(TOY)/nmk-serve build/nmk-chat
# Two tests need the shape of the large model.
build-test: all build/nmk-chat build/nmk-bench $(C_TESTS) $(TINY_TESTS) build/tests/north-mini-code/runtime/load_memory \
    build/tests/north-mini-code/server/long_context \
    build/fuzz/fuzz build-asan-tests $(SHAPES:%=build/tests/%/ops/attention) \
    build/tests/toy-64/runtime/engine_cpu build/tests/toy-64/runtime/columns

-include $(shell find build -name '*.d' -not -path 'build/?san/*' 2>/dev/null)
