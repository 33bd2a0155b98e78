/* Builds the task lists from tables: one row per run of tasks of a node, what differs between its tasks in columns that
 * many runs share. The words are those that nmkgen proved, or the encoder fails. */
#include "abi.h"

#include <string.h>

/* Word `word` of task i is base, plus columns[column + i] where column is not -1. */
struct set {
    int32_t word, base, column;
};

/* `tasks` tasks of one node, task i on SM columns[sms + i]; they come after what earlier runs gave that SM. */
struct run {
    int32_t header[8];
    int32_t tasks, sms, first_set, sets;
};

//@slot tables

static uint64_t mix(uint64_t hash, int32_t word)
{
    return (hash ^ (uint32_t)word) * 0x100000001b3u;
}

static uint64_t hash_of(const int32_t *lists, const int32_t counts[NMK_SMS])
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (int sm = 0; sm < NMK_SMS; sm++) {
        const int32_t *d = lists + (size_t)sm * NMK_MAX_TASKS * NMK_DESC_WORDS;
        hash = mix(hash, counts[sm]);
        for (int i = 0; i < counts[sm] * NMK_DESC_WORDS; i++) hash = mix(hash, d[i]);
    }
    return hash;
}

int nmk_encode(int32_t *lists, int32_t counts[NMK_SMS])
{
    memset(lists, 0, sizeof(int32_t) * NMK_SMS * NMK_MAX_TASKS * NMK_DESC_WORDS);
    memset(counts, 0, sizeof(int32_t) * NMK_SMS);
    for (size_t r = 0; r < sizeof runs / sizeof *runs; r++) {
        const struct run *run = &runs[r];
        for (int i = 0; i < run->tasks; i++) {
            const int32_t sm = columns[run->sms + i];
            if (sm < 0 || sm >= NMK_SMS || counts[sm] >= NMK_MAX_TASKS - 1) return -1;
            int32_t *d = lists + ((size_t)sm * NMK_MAX_TASKS + (size_t)counts[sm]++) * NMK_DESC_WORDS;
            memcpy(d, run->header, sizeof run->header);
            for (int k = 0; k < run->sets; k++) {
                const struct set *set = &sets[run->first_set + k];
                d[set->word] = set->base + (set->column < 0 ? 0 : columns[set->column + i]);
            }
        }
    }
    return hash_of(lists, counts) == WORDS_HASH ? 0 : -1;
}
