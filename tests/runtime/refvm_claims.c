/* Work that is claimed on the reference machine: it is shared out anew with every seed, and a unit that is handed out
 * twice or to nobody ends the step with its name. */
#include "refvm.c"

#include "runtime/refvm_toy.h"

enum { LAYER = 2, SEEDS = 8, STEPS = 4 };

static void begin(struct toy *t) {
    memset(t->vm.counters, 0, sizeof(uint32_t) * NMK_COUNTERS * NMK_COUNTER_WORDS), t->vm.epoch = 0;
    memset(t->vm.tickets, 0, TICKETS_BYTES);
}

/* Another list: every task of (op, layer) has `value` in its word. */
static void put(struct toy *t, int opcode, int layer, int word, int value) {
    int32_t *lists = (int32_t *)(uintptr_t)t->vm.lists;
    for (int i = 0; i < NMK_SMS * NMK_MAX_TASKS; i++) {
        int32_t *d = lists + (size_t)i * NMK_DESC_WORDS;
        if (d[NMK_WORD_OPCODE] == opcode && nmk_nodes[d[NMK_WORD_NODE]].layer == layer) d[word] = value;
    }
}

/* Steps until one fails with `want` in its message, which the one after `after` steps must; "": none may. */
static void refused(const char *name, struct toy *t, int after, const char *want) {
    char err[1024] = "";
    int ran = 0;
    while (ran < STEPS && !step(t, err, sizeof err)) ran++;
    result(ran == after && (*want ? strstr(err, want) != NULL : ran == STEPS), name, "%d steps%s%s", ran,
           ran < STEPS ? ", then " : "", err);
}

/* Who had the units of the layer's experts in the last step; the number of units. */
static int owners(const struct toy *t, short *owner) {
    struct claims *c = claims_of(&t->vm, LAYER);
    for (int i = 0; i < NMK_CLAIM_UNITS; i++) owner[i] = c->owner[i];
    return c->units;
}

int main(void) {
    static short owner[SEEDS][NMK_CLAIM_UNITS];
    struct toy *t = toy_open();
    int32_t ids[NMK_COLUMNS], *lists = zeroed(t->list_bytes);
    int units = 0, alike = 0, most = 0;
    for (int i = 0; i < NMK_COLUMNS; i++) ids[i] = 100 + 37 * i;
    set_columns(t, 0, ids, 0, NMK_COLUMNS);

    t->vm.threads = 1;
    for (int seed = 0; seed < SEEDS; seed++) {
        begin(t), t->vm.seed = (uint64_t)seed;
        set_columns(t, 0, ids, 0, NMK_COLUMNS);
        must_step(t);
        units = owners(t, owner[seed]);
        int count[NMK_SMS + 1] = {0};
        for (int i = 0; i < units; i++)
            if (++count[owner[seed][i]] > most) most = count[owner[seed][i]];
        for (int other = 0; other < seed; other++) alike += !memcmp(owner[seed], owner[other], sizeof owner[seed]);
    }
    result(units > NMK_EXPERTS_PER_TOKEN && alike == 0, "seeds share the units out differently",
           "%d units, %d of %d pairs of seeds alike, up to %d on one SM", units, alike, SEEDS * (SEEDS - 1) / 2, most);

    t->vm.lists = lists;
    begin(t), memcpy(lists, t->lists, t->list_bytes);
    refused("intact lists", t, STEPS, "");

    begin(t), t->vm.tickets[(2 * LAYER + 1) * NMK_COUNTER_WORDS] = 3;
    refused("a ticket that begins at 3", t, 0, "layer2.expert_up: unit 0 of ");

    /* the words of odd and even steps are taken in turn, so the third step is the first to see the lost reset */
    begin(t), put(t, NMK_OP_ROUTE, LAYER, NMK_WORD_ROUTE_TICKET, LAYER + 1);
    refused("a ticket that nobody resets", t, 2, "layer2.expert_up: unit 0 of ");

    begin(t), memcpy(lists, t->lists, t->list_bytes);
    put(t, NMK_OP_EXPERT_UP, LAYER, NMK_WORD_EXPERT_UP_TICKET, LAYER - 1);
    refused("two nodes with one ticket", t, 0, "another node claims by ticket 1");

#if NMK_SEGMENTS_CLAIMED
    begin(t), memcpy(lists, t->lists, t->list_bytes);
    t->vm.tickets[(2 * NMK_LAYERS + 1) * NMK_COUNTER_WORDS] = 1;
    refused("a ticket of attention that begins at 1", t, 0, "layer0.attention: unit 0 of ");
#endif

    /* a ticket that goes back while it is drawn from */
    struct vm_sm sm = {.held = -1};
    int32_t d[WORDS] = {NMK_OP_EXPERT_UP, LAYER, -1, 0, -1, 0, -1, 0};
    int unit, got = MORE, had = 0;
    begin(t), memset(t->vm.state->claims, 0, sizeof t->vm.state->claims);
    for (int i = 0; i < 4 && got == MORE; i++) {
        if (i == 2) *ticket_at(&t->vm, LAYER, t->vm.epoch) = 0;
        got = claim(&t->vm, &sm, d, LAYER, NMK_CLAIM_QUEUE, 0, 10, &unit);
        had += unit >= 0;
    }
    result(got < 0 && had == 1 && strstr(sm.err, "unit 0 is claimed twice"), "a unit that is handed out twice", "%s",
           sm.err);

    /* all units of every way of dealing, by SMs in turn */
    int wrong = 0;
    for (int how = NMK_CLAIM_STATIC; how <= NMK_CLAIM_QUEUE; how++)
        for (int all = 0; all <= NMK_CLAIM_UNITS; all += 1 + all / 7) {
            static struct vm_sm sms[NMK_SMS];
            memset(t->vm.state->claims, 0, sizeof t->vm.state->claims), begin(t);
            int done = 0, moves = 0;
            for (int s = 0; s < NMK_SMS; s++) sms[s].id = s, sms[s].claimed = 0, sms[s].held = -1;
            for (int left = NMK_SMS; left > 0; moves++) {
                struct vm_sm *one = &sms[moves * 7 % NMK_SMS];
                if (one->claimed < 0) continue;
                got = claim(&t->vm, one, d, LAYER, how, (one->id * 5 + 1) % NMK_SMS, all, &unit);
                done += unit >= 0, wrong += got < 0;
                if (got != MORE) left--, one->claimed = -1;
            }
            wrong += done != all || report_unclaimed(&t->vm, sm.err, sizeof sm.err);
        }
    result(wrong == 0, "every unit once, however it is dealt", "%d wrong", wrong);
    nmk_vm_close(&t->vm);
    return failures != 0;
}
