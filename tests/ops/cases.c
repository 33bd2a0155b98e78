/* The //@test sections of the model's ops on the CPU machine.  Arguments: names of ops; none: all that have tests. */
#include "refvm.c"

#include "ops/helper_cases.h"

#include "op_tests.h"

static int asked_for(const char *op, int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], op)) return 1;
    return argc == 1;
}

int main(int argc, char **argv) {
    static struct op_test test;
    int32_t counts[NMK_SMS], *lists = calloc((size_t)NMK_SMS * NMK_MAX_TASKS * NMK_DESC_WORDS, sizeof *lists);
    struct nmk_vm vm = {.lists = lists, .arena = malloc((size_t)NMK_ARENA_BYTES)};
    vm.weights = calloc(NMK_WEIGHTS_KIB, 1024);
    int failures = 0, ran = 0;
    if (!lists || !vm.arena || !vm.weights || nmk_encode(lists, counts)) {
        printf("not ok - op cases: cannot be set up\n");
        return 1;
    }
    for (const struct op_case *c = op_cases; c->run; c++)
        for (int pass = 0; asked_for(c->op, argc, argv) && pass < PASSES; pass++, ran++) {
            begin_case(&test, c, pass, &vm);
            const int good = !test.why[0] && !run_on_cpu(&test) && compare_case(&test, c->tolerance, vm.arena);
            printf("%s - op %s: %s, %s%s%s\n", good ? "ok" : "not ok", c->op, c->name,
                   pass ? "some columns live" : "all columns live", good ? "" : ": ", test.why);
            failures += !good;
            end_case(&test);
        }
    if (!ran) printf("not ok - op cases: no op with tests %s\n", argc > 1 ? "is called so in this model" : "at all");
    free(lists), free(vm.arena), free((void *)(uintptr_t)vm.weights);
    return failures || !ran;
}
