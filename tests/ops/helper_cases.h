/* What the //@test sections of ops may call, and how a case runs on the CPU machine.
 *
 * A section fills what its op reads and says what the op must then have left; it knows nothing of tasks: all of the
 * node's are run, on all SMs.  What it does not fill is NaN, so that an op which reads elsewhere is found out.  A case
 * runs twice, with all columns live and with some; a chunk of prompts has three spans, then a short one alone.
 *
 * Include refvm.c before, op_tests.h behind. */
#ifndef NMK_TESTS_OPS_HELPER_CASES_H
#define NMK_TESTS_OPS_HELPER_CASES_H

enum { MOST_OUTPUTS = 4, PASSES = 2 };

struct op_output {
    const nmk_buffer *buffer;
    int is_bf16;
    float *want; /* an element each; NaN: not said */
};

struct op_test {
    struct nmk_vm vm;
    nmk_control control;
#ifdef NMK_PREFILL_TOKENS
    nmk_chunk chunk;
#endif
    const int32_t *task; /* the node's first */
    struct vm_sm sm[NMK_SMS];
    struct op_output output[MOST_OUTPUTS];
    int outputs;
    int on_sm; /* the section has set what an SM keeps to itself */
    uint64_t random;
    char why[160]; /* the section itself is wrong */
};

struct op_case {
    int opcode;
    const char *op, *name;
    double tolerance;
    void (*run)(struct op_test *test);
};

/* ---- for sections ---- */

#ifdef NMK_PREFILL_TOKENS
/* Whether the chunk has token n. */
__attribute__((unused)) static int live(const struct op_test *test, int n) { return n < test->chunk.tokens; }
#else
__attribute__((unused)) static int live(const struct op_test *test, int column) { return active(&test->vm, column); }
#endif

/* Uniform in low .. high. */
__attribute__((unused)) static float uniform(struct op_test *test, double low, double high) {
    return (float)(low + (high - low) * (double)(draw(&test->random) >> 11) * 0x1p-53);
}

static const nmk_buffer *buffer_at(struct op_test *test, int32_t offset128) {
    for (int i = 0; i < nmk_buffer_count; i++)
        if (nmk_buffers[i].offset128 == offset128) return &nmk_buffers[i];
    snprintf(test->why, sizeof test->why, "no buffer begins at %d: pass a field of t that names one", offset128);
    return &nmk_buffers[0];
}

/* A buffer that the op reads, to be filled; t.NAME is its offset. */
__attribute__((unused)) static void *input(struct op_test *test, int32_t offset128) {
    return buffer(&test->vm, buffer_at(test, offset128)->offset128);
}

static float *expect(struct op_test *test, int32_t offset128, int is_bf16) {
    if (test->outputs == MOST_OUTPUTS) {
        snprintf(test->why, sizeof test->why, "more than %d outputs", MOST_OUTPUTS);
        test->outputs = 0;
    }
    struct op_output *o = &test->output[test->outputs++];
    o->buffer = buffer_at(test, offset128), o->is_bf16 = is_bf16;
    const size_t n = (size_t)o->buffer->bytes / (is_bf16 ? 2 : 4);
    free(o->want);
    o->want = malloc(n * sizeof *o->want);
    if (!o->want) abort();
    for (size_t i = 0; i < n; i++) o->want[i] = NAN;
    return o->want;
}

/* What the op must leave in a buffer, element by element; those that are not set are not compared. */
__attribute__((unused)) static float *expect_f32(struct op_test *test, int32_t offset128) {
    return expect(test, offset128, 0);
}

__attribute__((unused)) static float *expect_bf16(struct op_test *test, int32_t offset128) {
    return expect(test, offset128, 1);
}

/* What an SM has from earlier tasks (struct vm_sm), zero at first.  Such a case runs on the CPU machine alone. */
__attribute__((unused)) static struct vm_sm *on_sm(struct op_test *test, int sm) {
    test->on_sm = 1;
    return &test->sm[sm];
}

/* ---- for those who run them ---- */

/* The first task of the opcode in the lists, NULL: none has it. */
static const int32_t *first_task(const int32_t *lists, int opcode) {
    for (size_t i = 0; i < (size_t)NMK_SMS * NMK_MAX_TASKS; i++)
        if (lists[i * NMK_DESC_WORDS] == opcode) return lists + i * NMK_DESC_WORDS;
    return NULL;
}

/* Whether d is a task of the same node as the first one. */
static int same_node(const int32_t *first, const int32_t *d) { return d[0] == first[0] && d[1] == first[1]; }

/* Sets a case up.  vm has lists, arena and weights, and keeps them. */
static void begin_case(struct op_test *test, const struct op_case *c, int pass, const struct nmk_vm *vm) {
    memset(test, 0, sizeof *test);
    test->vm = *vm, test->vm.control = &test->control, test->random = (uint64_t)(c->opcode * PASSES + pass);
    for (int n = 0; n < NMK_COLUMNS; n++) {
        const int on = pass == 0 || 0x65 >> n & 1;
        test->control.column[n] =
            (nmk_column){.pos = on ? n : -1, .base = on ? n : 0, .group = n, .slot = n, .flags = 1, .remaining = 9};
    }
#ifdef NMK_PREFILL_TOKENS
    const nmk_span span[PASSES][3] = {{{0, 70, 5, 2}, {70, 1, 0, 0}, {71, 129, 300, 1}}, {{0, 13, 63, 0}}};
    test->chunk.spans = pass ? 1 : 3, test->chunk.tokens = pass ? 13 : 200;
    memcpy(test->chunk.span, span[pass], sizeof span[pass]);
    for (int n = 0; n < test->chunk.tokens; n++) test->chunk.token[n] = n * 37 % NMK_VOCAB;
    test->vm.control = NULL, test->vm.chunk = &test->chunk;
#endif
    for (int s = 0; s < NMK_SMS; s++) test->sm[s].id = s;
    test->task = first_task(vm->lists, c->opcode);
    memset(vm->arena, 0xff, (size_t)NMK_ARENA_BYTES);
    if (test->task)
        c->run(test);
    else
        snprintf(test->why, sizeof test->why, "no list has a task of it");
}

static void end_case(struct op_test *test) {
    for (int i = 0; i < MOST_OUTPUTS; i++) free(test->output[i].want);
}

static int run_on_cpu(struct op_test *test) {
    for (int s = 0; s < NMK_SMS; s++)
        for (int i = 0; i < NMK_MAX_TASKS && task_at(&test->vm, s, i)[0]; i++)
            if (same_node(test->task, task_at(&test->vm, s, i)) &&
                execute(&test->vm, &test->sm[s], task_at(&test->vm, s, i))) {
                snprintf(test->why, sizeof test->why, "on SM %d: %.100s", s, test->sm[s].err);
                return -1;
            }
    return 0;
}

static float element(const struct op_output *o, const uint8_t *arena, size_t i) {
    const uint8_t *at = arena + (size_t)o->buffer->offset128 * 128;
    float f;
    if (o->is_bf16) return bf16_value(((const uint16_t *)(const void *)at)[i]);
    memcpy(&f, at + i * sizeof f, sizeof f);
    return f;
}

/* Compares what is said with what is in the arena: 1 where all is within the tolerance, as a share of a value or of 1. */
static int compare_case(struct op_test *test, double tolerance, const uint8_t *arena) {
    size_t said = 0, wrong = 0;
    double worst = 0;
    char first[80] = "";
    for (int k = 0; k < test->outputs && !test->why[0]; k++) {
        const struct op_output *o = &test->output[k];
        for (size_t i = 0; i < (size_t)o->buffer->bytes / (o->is_bf16 ? 2 : 4); i++) {
            const double want = o->want[i], got = element(o, arena, i);
            if (isnan(want)) continue;
            const double off = got == want ? 0 : fabs(got - want) / fmax(1, fabs(want));
            said++;
            if (off <= worst) continue;
            if (!(off <= tolerance) && !wrong++)
                snprintf(first, sizeof first, "%s[%zu] is %.9g, expected %.9g", o->buffer->name, i, got, want);
            if (off > worst) worst = off;
        }
    }
    if (!test->why[0] && !said) snprintf(test->why, sizeof test->why, "it says nothing of what the op must leave");
    if (!test->why[0] && wrong) snprintf(test->why, sizeof test->why, "%s", first);
    return !test->why[0];
}

#endif
