/* The core of the fuzzers, see fuzz.h.
 *
 *     fuzz [--seconds N] [--seed S] TARGET...   mutates, a target after the other
 *     fuzz TARGET FILE...                       runs these inputs
 *     fuzz --list                               the targets
 *
 * Inputs that reached new code are kept in build/fuzz/corpus/TARGET; the next run begins with them. */
#define _GNU_SOURCE /* GLOB_BRACE */
#include "fuzz.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/lsan_interface.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "util.h"

static const fuzz_target *const targets[] = {
#define X(name) &fuzz_##name,
    FUZZ_TARGETS
#undef X
};
enum { TARGETS = sizeof targets / sizeof *targets };

enum {
    MAP = 1 << 17,        /* edges are told apart by hashes of this many values */
    MOST_INPUT = 1 << 20, /* of a seed, a file */
    MOST_MADE = 8 << 10,  /* of what is made, unless the target says otherwise */
    MOST_WORDS = 8192,
    WORD = 40,
    BATCH_BYTES = 32 << 20, /* inputs between two looks for leaks */
    BATCH_INPUTS = 4096,
    WRONG = 96,         /* exit status of fuzz_wrong */
    STUCK_SECONDS = 60, /* of an input that does not compute */
};

/* Between the process that runs inputs and the one that watches it. */
typedef struct {
    _Atomic uint64_t began_ns; /* processor time of the runner when the input began; 0: none runs */
    _Atomic uint64_t inputs;
    _Atomic bool stop, leaked;
    _Atomic size_t kept, edges;
    _Atomic uint64_t slowest_ns;
    size_t bytes;
    char input[MOST_INPUT];
    size_t batch_at[BATCH_INPUTS + 1];
    int batch;
    char batch_bytes[BATCH_BYTES];
} shared;

static shared *s;
static const fuzz_target *target;
static char folder[64];

/* As ASan is to be.  A hundred fuzzers have to fit a small machine, and what wants gigabytes is a finding. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) {
    return "quarantine_size_mb=16:hard_rss_limit_mb=2000:max_allocation_size_mb=1500:allocator_may_return_null=0:"
           "detect_stack_use_after_return=0:handle_abort=1";
}
const char *__ubsan_default_options(void);
const char *__ubsan_default_options(void) { return "print_stacktrace=1"; }

/* ---------------------------------------------------------------- random numbers */

typedef struct {
    uint64_t state;
} source;

/* splitmix64 */
static uint32_t next(source *r) {
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 16 ^ z >> 33);
}

static source made, own; /* of mutations; of fuzz_below */
static size_t below(size_t n) { return n ? next(&made) % n : 0; }
uint32_t fuzz_below(uint32_t n) { return n ? next(&own) % n : 0; }

static uint64_t hash_of(const void *data, size_t bytes) {
    const unsigned char *p = data;
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return h ^ h >> 29;
}

/* ---------------------------------------------------------------- what an input reached */

static unsigned char map[MAP], seen[MAP];
static bool counting;
static __thread uintptr_t last;

/* Called at the start of every block of instrumented code. */
void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void) {
    if (!counting) return;
    uintptr_t here = (uintptr_t)__builtin_return_address(0) - (uintptr_t)&targets;
    here = (here ^ here >> 17) * 0x9e3779b1u;
    unsigned char *count = &map[(here ^ last) % MAP];
    if (*count < 255) ++*count;
    last = here >> 1;
}

void fuzz_feature(const char *text) { map[hash_of(text, strlen(text)) % MAP] = 1; }

/* Counts are told apart by their order of magnitude. */
static unsigned char magnitude(unsigned count) {
    return (unsigned char)(count < 4    ? 1u << (count - 1)
                           : count < 8  ? 8
                           : count < 16 ? 16
                           : count < 32 ? 32
                                        : (count < 128 ? 64 : 128));
}

/* Whether the last input reached something new. */
static bool is_new(void) {
    bool some = false;
    for (size_t i = 0; i < MAP; i += 8) {
        uint64_t eight;
        memcpy(&eight, map + i, 8);
        if (!eight) continue;
        for (size_t k = i; k < i + 8; k++) {
            if (!map[k]) continue;
            unsigned char m = magnitude(map[k]);
            if (seen[k] & m) continue;
            if (!seen[k]) s->edges++;
            seen[k] |= m, some = true;
        }
    }
    return some;
}

/* ---------------------------------------------------------------- inputs and words */

typedef struct {
    char *data;
    size_t bytes;
} input;

static input *corpus;
static size_t corpus_count, corpus_room;
static char words[MOST_WORDS][WORD + 1];
static size_t word_bytes[MOST_WORDS];
static size_t word_count;

void fuzz_seed(const void *data, size_t bytes) {
    if (bytes > MOST_INPUT) bytes = MOST_INPUT;
    if (corpus_count == corpus_room)
        corpus = xrealloc(corpus, sizeof *corpus * (corpus_room = corpus_room ? 2 * corpus_room : 64));
    char *copy = xmalloc(bytes + 1);
    memcpy(copy, data, bytes), copy[bytes] = 0;
    corpus[corpus_count++] = (input){copy, bytes};
}

void fuzz_seed_text(const char *text) { fuzz_seed(text, strlen(text)); }

static void seed_file(const char *path) {
    nmk_err e;
    char *data;
    size_t bytes;
    if (nmk_file_read(&data, &bytes, path, MOST_INPUT, &e)) fprintf(stderr, "fuzz: %s\n", e.text), exit(2);
    fuzz_seed(data, bytes);
    free(data);
}

static void each_file(const char *pattern, bool needed, void (*f)(const char *path)) {
    glob_t found;
    if (glob(pattern, GLOB_BRACE, NULL, &found)) {
        if (needed) fprintf(stderr, "fuzz: no file %s\n", pattern), exit(2);
        return;
    }
    for (size_t i = 0; i < found.gl_pathc; i++) f(found.gl_pathv[i]);
    globfree(&found);
}

void fuzz_seed_files(const char *pattern) { each_file(pattern, true, seed_file); }

static void add_word(const char *text, size_t bytes) {
    if (!bytes || bytes > WORD || word_count == MOST_WORDS) return;
    for (size_t i = 0; i < word_count; i++)
        if (word_bytes[i] == bytes && !memcmp(words[i], text, bytes)) return;
    memcpy(words[word_count], text, bytes);
    word_bytes[word_count++] = bytes;
}

void fuzz_word(const char *text) { add_word(text, strlen(text)); }

static void words_of_file(const char *path) {
    nmk_err e;
    char *data, word[WORD + 1];
    size_t bytes;
    if (nmk_file_read(&data, &bytes, path, 8 << 20, &e)) fprintf(stderr, "fuzz: %s\n", e.text), exit(2);
    for (size_t i = 0; i < bytes; i++) {
        if (data[i] != '"') continue;
        size_t n = 0, k = i + 1;
        for (; k < bytes && data[k] != '"' && data[k] != '\n' && n <= WORD; k++) {
            if (data[k] == '\\') k++;
            if (n < WORD) word[n] = data[k];
            n++;
        }
        if (n && n <= WORD && data[k] == '"') add_word(word, n);
        while (k < bytes && data[k] != '"' && data[k] != '\n') k++;
        i = k;
    }
    free(data);
}

void fuzz_words_of(const char *pattern) { each_file(pattern, true, words_of_file); }

/* ---------------------------------------------------------------- mutations */

static char work[MOST_INPUT];
static size_t used, most;

/* Replaces [at, at + out) by n bytes, which may lie in `work`; no longer than allowed. */
static void replace(size_t at, size_t out, const char *data, size_t n) {
    static char copy[MOST_INPUT];
    if (n > MOST_INPUT) n = MOST_INPUT;
    if (used - out + n > most) n = most > used - out ? most - (used - out) : 0;
    memcpy(copy, data, n);
    memmove(work + at + n, work + at + out, used - at - out);
    memcpy(work + at, copy, n);
    used += n - out;
}

static bool is_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == '-' || c == '+';
}

/* The token around a place: a word, else one character. */
static void token_at(const char *data, size_t bytes, size_t at, size_t *from, size_t *past) {
    *from = at, *past = at + 1;
    if (!is_word(data[at])) return;
    while (*from && is_word(data[*from - 1])) --*from;
    while (*past < bytes && is_word(data[*past])) ++*past;
}

/* What the bracket, or quote, at a place opens, its end included; false: it opens nothing. */
static bool closed_at(const char *data, size_t bytes, size_t at, size_t *past) {
    static const char open[] = "([{<\"'", close[] = ")]}>\"'";
    const char *kind = data[at] ? strchr(open, data[at]) : NULL;
    if (!kind) return false;
    char o = *kind, c = close[kind - open];
    int depth = 0;
    for (size_t i = at; i < bytes; i++) {
        if (data[i] == c && i > at && --depth == 0) return *past = i + 1, true;
        if (data[i] == o && (o != c || i == at)) depth++;
    }
    return false;
}

static bool some_closed(const char *data, size_t bytes, size_t *from, size_t *past) {
    for (int tries = 0; tries < 20 && bytes; tries++) {
        *from = below(bytes);
        for (size_t k = 0; k < 64 && *from < bytes; k++, ++*from)
            if (closed_at(data, bytes, *from, past)) return true;
    }
    return false;
}

static size_t some_length(size_t limit) {
    size_t n = 1 + below(below(4) ? 8 : below(4) ? 64 : 2048);
    return n < limit ? n : limit;
}

static const input *other(void) { return &corpus[below(corpus_count)]; }

static void number_in(void) {
    static const char *const numbers[] = {"0",
                                          "1",
                                          "-1",
                                          "2",
                                          "7",
                                          "64",
                                          "127",
                                          "128",
                                          "255",
                                          "256",
                                          "32768",
                                          "65535",
                                          "65536",
                                          "1000000",
                                          "2147483647",
                                          "2147483648",
                                          "4294967295",
                                          "4294967296",
                                          "9007199254740993",
                                          "9223372036854775807",
                                          "9223372036854775808",
                                          "-9223372036854775808",
                                          "18446744073709551615",
                                          "18446744073709551616",
                                          "1e9",
                                          "1e19",
                                          "1e308",
                                          "1e309",
                                          "1e-320",
                                          "0.1",
                                          "-0.0",
                                          "0.5",
                                          "1.5"};
    size_t at = below(used), from, past;
    for (size_t k = 0; k < used; k++, at = (at + 1) % used)
        if (work[at] >= '0' && work[at] <= '9') break;
    if (work[at] < '0' || work[at] > '9') return;
    for (from = at; from && work[from - 1] >= '0' && work[from - 1] <= '9';) from--;
    for (past = at; past < used && work[past] >= '0' && work[past] <= '9';) past++;
    const char *n = numbers[below(sizeof numbers / sizeof *numbers)];
    char near[24];
    if (!below(3) && past - from < 9) {
        long value = 0;
        for (size_t i = from; i < past; i++) value = value * 10 + (work[i] - '0');
        snprintf(near, sizeof near, "%ld", value + (below(2) ? 1 : -1));
        n = near;
    }
    replace(from, past - from, n, strlen(n));
}

static void change(void) {
    size_t at = below(used + 1), n = some_length(used - at), from, past;
    const input *o = other();
    if (!used) {
        replace(0, 0, o->data, o->bytes);
        return;
    }
    switch (below(18)) {
    case 0: work[below(used)] ^= (char)(1 << below(8)); break;
    case 1: work[below(used)] = (char)next(&made); break;
    case 2: {
        char bytes[4] = {(char)next(&made), (char)next(&made), (char)next(&made), (char)next(&made)};
        replace(at, 0, bytes, 1 + below(4));
        break;
    }
    case 3: replace(at, n, "", 0); break;
    case 4: replace(below(used), 0, work + at, n); break;
    case 5:
    case 6: { /* a piece of another */
        if (!o->bytes) break;
        from = below(o->bytes);
        replace(at, below(2) ? n : 0, o->data + from, some_length(o->bytes - from));
        break;
    }
    case 7: /* the rest of another */
        if (!o->bytes) break;
        from = below(o->bytes);
        replace(at, used - at, o->data + from, o->bytes - from);
        break;
    case 8:
    case 9:
    case 10: { /* a word in place of a token, or before it */
        if (!word_count) break;
        size_t w = below(word_count);
        token_at(work, used, at < used ? at : used - 1, &from, &past);
        replace(from, below(2) ? past - from : 0, words[w], word_bytes[w]);
        break;
    }
    case 11: { /* another's token in place of one */
        size_t f, p;
        if (!o->bytes) break;
        token_at(o->data, o->bytes, below(o->bytes), &f, &p);
        token_at(work, used, at < used ? at : used - 1, &from, &past);
        replace(from, past - from, o->data + f, p - f);
        break;
    }
    case 12: number_in(); break;
    case 13: /* a token, or what is in brackets, goes */
        if (below(2) && some_closed(work, used, &from, &past)) {
            replace(from, past - from, "", 0);
            break;
        }
        token_at(work, used, at < used ? at : used - 1, &from, &past);
        replace(from, past - from, "", 0);
        break;
    case 14: { /* what is in brackets, by what is in others */
        size_t f, p;
        const input *by = below(2) ? o : &(input){work, used};
        if (!some_closed(work, used, &from, &past) || !some_closed(by->data, by->bytes, &f, &p)) break;
        replace(from, past - from, by->data + f, p - f);
        break;
    }
    case 15: { /* deeper: what comes before a piece in brackets again and again, and so what comes after it */
        size_t f, p;
        if (!some_closed(work, used, &from, &past) || past - from < 3) break;
        if (!some_closed(work + from + 1, past - from - 2, &f, &p)) break;
        size_t before = f + 1, after = past - (from + 1 + p), times = 1 + below(below(4) ? 8 : 300);
        f += from + 1, p += from + 1;
        static char head[MOST_INPUT], tail[MOST_INPUT];
        memcpy(head, work + from, before), memcpy(tail, work + p, after);
        for (size_t i = 0; i < times && used + before + after <= most; i++) {
            replace(p, 0, tail, after);
            replace(f, 0, head, before);
            f += before, p += before;
        }
        break;
    }
    case 16: { /* many times */
        static char piece[64];
        size_t count = n < sizeof piece ? n : sizeof piece, times = 1 + below(below(4) ? 16 : 4096);
        memcpy(piece, work + at, count);
        for (size_t i = 0; count && i < times && used + count <= most; i++) replace(at, 0, piece, count);
        break;
    }
    default: { /* a list's element, or a line, twice */
        static const char ends[] = {',', '\n', '|', ' '};
        char end = ends[below(4)];
        for (from = at; from && work[from - 1] != end;) from--;
        for (past = at; past < used && work[past] != end;) past++;
        past += past < used;
        replace(below(2) ? past : from, 0, work + from, past - from);
    }
    }
}

static void make(void) {
    const input *from = below(3) ? other() : &corpus[corpus_count - 1 - below(corpus_count < 16 ? corpus_count : 16)];
    used = from->bytes;
    memcpy(work, from->data, used);
    most = target->max_bytes ? target->max_bytes : MOST_MADE;
    if (most < used) most = used;
    for (size_t n = 1 + below(below(2) ? 3 : 10); n; n--) change();
}

/* ---------------------------------------------------------------- for targets */

void fuzz_wrong(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("ERROR: wrong: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    fflush(stderr);
    _exit(WRONG);
}

const char *fuzz_folder(void) { return folder; }

static char *path_of(const char *name) { return xasprintf("%s/%s", folder, name); }

void fuzz_write(const char *name, const void *data, size_t bytes) {
    char *path = path_of(name), *slash = strchr(name, '/') ? strrchr(path, '/') : NULL;
    if (slash) *slash = 0, mkdir(path, 0777), *slash = '/';
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, bytes, f) != bytes || fclose(f)) fuzz_wrong("%s: %s", path, strerror(errno));
    free(path);
}

void fuzz_write_parts(const char *data, size_t bytes, const char *const *names, int count) {
    const char *end = data + bytes, *at = data;
    for (int i = 0; i < count; i++) {
        char *path = path_of(names[i]);
        unlink(path);
        free(path);
    }
    for (int part = 0; at < end;) {
        const char *past = at; /* of this part */
        while (past < end && !(end - past > 5 && !memcmp(past, "%%%% ", 5) && (past == data || past[-1] == '\n')))
            past++;
        if (part >= 0 && past > at) fuzz_write(names[part], at, (size_t)(past - at));
        if (past == end) return;
        const char *name = past + 5, *line = memchr(name, '\n', (size_t)(end - name));
        if (!line) line = end;
        part = -1;
        for (int i = 0; i < count; i++)
            if (strlen(names[i]) == (size_t)(line - name) && !memcmp(names[i], name, (size_t)(line - name))) part = i;
        at = line < end ? line + 1 : end;
        if (part >= 0 && at == end) fuzz_write(names[part], "", 0);
    }
}

static void remove_folder(const char *path) {
    DIR *d = opendir(path);
    for (struct dirent *f; d && (f = readdir(d));) {
        if (!strcmp(f->d_name, ".") || !strcmp(f->d_name, "..")) continue;
        char *name = xasprintf("%s/%s", path, f->d_name);
        if (unlink(name)) remove_folder(name);
        free(name);
    }
    if (d) closedir(d);
    rmdir(path);
}

/* ---------------------------------------------------------------- the process that runs inputs */

static uint64_t processor_ns(clockid_t clock) {
    struct timespec t = {0};
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec + 1;
}

static void run_input(const char *data, size_t bytes) {
    char *exact = xmalloc(bytes + 1); /* so that whoever reads beyond it is caught */
    memcpy(exact, data, bytes), exact[bytes] = 0;
    memcpy(s->input, data, bytes);
    s->bytes = bytes;
    own.state = hash_of(data, bytes);
    memset(map, 0, sizeof map);
    last = 0;
    s->began_ns = processor_ns(CLOCK_PROCESS_CPUTIME_ID);
    counting = true;
    target->run(exact, bytes);
    counting = false;
    uint64_t took = processor_ns(CLOCK_PROCESS_CPUTIME_ID) - s->began_ns;
    if (took > s->slowest_ns) s->slowest_ns = took;
    s->began_ns = 0;
    s->inputs++;
    free(exact);
}

/* The runner's output goes to a file. */
static void begin_running(const char *log) {
    int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666), none = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || none < 0) perror(log), exit(2);
    dup2(none, 0), dup2(fd, 1), dup2(fd, 2);
    signal(SIGPIPE, SIG_IGN);
    snprintf(folder, sizeof folder, "build/fuzz/tmp.%d", (int)getpid());
    mkdir(folder, 0777);
    if (target->open) target->open();
}

/* Until it is told to stop, or something leaks. */
static _Noreturn void run_mutations(const char *kept_in) {
    uint64_t looked = nmk_now_ns();
    size_t seeds = corpus_count;
    for (size_t i = 0; !s->stop; i++) {
        if (i < seeds) {
            used = corpus[i].bytes;
            memcpy(work, corpus[i].data, used);
        } else {
            make();
        }
        size_t at = s->batch_at[s->batch];
        memcpy(s->batch_bytes + at, work, used);
        s->batch_at[++s->batch] = at + used;
        run_input(work, used);
        if (is_new() && i >= seeds) {
            fuzz_seed(work, used);
            char *path = xasprintf("%s/%016llx", kept_in, (unsigned long long)hash_of(work, used));
            FILE *f = fopen(path, "wb");
            if (f) fwrite(work, 1, used, f), fclose(f);
            free(path);
        }
        s->kept = corpus_count - seeds;
        bool full = s->batch == BATCH_INPUTS || s->batch_at[s->batch] + MOST_INPUT > BATCH_BYTES;
        if (full || s->stop || nmk_now_ns() - looked > 5000000000u) {
            if (__lsan_do_recoverable_leak_check()) {
                s->leaked = true;
                break;
            }
            s->batch = 0, s->batch_at[0] = 0;
            looked = nmk_now_ns();
        }
    }
    remove_folder(folder);
    _exit(0);
}

/* Inputs batch[from..past), and a look for leaks. */
static _Noreturn void run_batch(int from, int past) {
    for (int i = from; i < past; i++) run_input(s->batch_bytes + s->batch_at[i], s->batch_at[i + 1] - s->batch_at[i]);
    s->leaked = __lsan_do_recoverable_leak_check();
    remove_folder(folder);
    _exit(0);
}

/* ---------------------------------------------------------------- the process that watches */

/* Waits for the runner.  NULL: it ended well; else what was wrong. */
static const char *watch(pid_t pid, double seconds) {
    static char why[200];
    uint64_t start = nmk_now_ns(), stuck = start, inputs = 0, limit = (uint64_t)(target->limit_ms ?: 1000) * 1000000u;
    clockid_t clock;
    int status;
    bool timed = !clock_getcpuclockid(pid, &clock);
    for (;;) {
        pid_t ended = waitpid(pid, &status, WNOHANG);
        if (ended == pid) break;
        uint64_t now = nmk_now_ns(), began = s->began_ns;
        if (seconds > 0 && now - start > seconds * 1e9) s->stop = true;
        if (s->inputs != inputs || !began) inputs = s->inputs, stuck = now;
        uint64_t spent = timed && began ? processor_ns(clock) - began : 0;
        bool slow = spent > limit && spent < (uint64_t)1 << 62 && s->began_ns == began;
        if (slow || now - stuck > STUCK_SECONDS * 1000000000ull) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            if (slow)
                snprintf(why, sizeof why, "takes more than %d ms", (int)(limit / 1000000));
            else
                snprintf(why, sizeof why, "is not done after %d s", STUCK_SECONDS);
            return why;
        }
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return NULL;
    if (WIFEXITED(status) && WEXITSTATUS(status) == WRONG)
        snprintf(why, sizeof why, "something is wrong");
    else if (WIFSIGNALED(status))
        snprintf(why, sizeof why, "signal %d", WTERMSIG(status));
    else
        snprintf(why, sizeof why, "exit status %d", WEXITSTATUS(status));
    return why;
}

/* What the runner said, from where something was wrong; `summary` gets the one line that says it best. */
static void show_log(const char *log, char *summary, size_t room) {
    static const char *const signs[] = {"ERROR: ", "runtime error: ", "SUMMARY: "};
    char line[1000];
    bool show = false;
    int shown = 0;
    FILE *f = fopen(log, "r");
    *summary = 0;
    while (f && fgets(line, sizeof line, f)) {
        for (int i = 0; i < 3; i++) {
            const char *found = strstr(line, signs[i]);
            if (!found) continue;
            show = true;
            if (!*summary) snprintf(summary, room, ": %.*s", (int)strcspn(line, "\n"), line);
        }
        if (show && shown++ < 60) printf("%.300s%s", line, strlen(line) > 300 ? "...\n" : "");
    }
    if (f) fclose(f);
}

static char *save(const char *data, size_t bytes) {
    mkdir("build/fuzz/found", 0777);
    char *path = xasprintf("build/fuzz/found/%s-%08x", target->name, (unsigned)(hash_of(data, bytes) & 0xffffffffu));
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, bytes, f) != bytes || fclose(f)) perror(path), exit(2);
    return path;
}

static void begin_watching(void) {
    s->began_ns = s->inputs = s->slowest_ns = s->kept = s->edges = 0;
    s->stop = s->leaked = false;
    s->batch = 0, s->batch_at[0] = 0;
    fflush(stdout);
}

static pid_t fork_runner(void) {
    pid_t pid = fork();
    if (pid < 0) perror("fork"), exit(2);
    return pid;
}

static void clean_after(pid_t pid) {
    snprintf(folder, sizeof folder, "build/fuzz/tmp.%d", (int)pid);
    remove_folder(folder);
}

/* Whether inputs batch[from..past) leak. */
static bool leak(const char *log, int from, int past) {
    s->leaked = false;
    pid_t pid = fork_runner();
    if (!pid) begin_running(log), run_batch(from, past);
    bool ended = !watch(pid, 0);
    clean_after(pid);
    return ended && s->leaked;
}

/* The input of a batch that leaks, found by halving it; the log is of it alone. */
static int leaking(const char *log) {
    int from = 0, past = s->batch;
    while (past - from > 1) {
        int half = (from + past) / 2;
        if (leak(log, from, half))
            past = half;
        else
            from = half;
    }
    leak(log, from, from + 1);
    return from;
}

static bool fuzz(double seconds, uint64_t seed) {
    /* Not on the heap: in the runner nobody would know them any more. */
    static char log[300], kept_in[300], pattern[400], summary[300];
    snprintf(log, sizeof log, "build/fuzz/%s.log", target->name);
    snprintf(kept_in, sizeof kept_in, "build/fuzz/corpus/%s", target->name);
    mkdir("build/fuzz/corpus", 0777), mkdir(kept_in, 0777);
    while (corpus_count) free(corpus[--corpus_count].data);
    word_count = 0;
    memset(seen, 0, sizeof seen);
    target->seeds();
    snprintf(pattern, sizeof pattern, "tests/fuzz/corpus/%s/*", target->name);
    each_file(pattern, false, seed_file);
    snprintf(pattern, sizeof pattern, "%s/*", kept_in);
    each_file(pattern, false, seed_file);
    made.state = seed ^ hash_of(target->name, strlen(target->name));
    begin_watching();
    pid_t pid = fork_runner();
    if (!pid) begin_running(log), run_mutations(kept_in);
    const char *why = watch(pid, seconds);
    clean_after(pid);
    const char *data = s->input;
    size_t bytes = s->bytes;
    unsigned long long inputs = s->inputs;
    if (!why && s->leaked) {
        int i = leaking(log);
        data = s->batch_bytes + s->batch_at[i], bytes = s->batch_at[i + 1] - s->batch_at[i], why = "leaks";
    }
    if (!why) {
        printf("ok - fuzz %s\n", target->name);
        printf("  %s: %llu inputs in %.0f s, the slowest %.0f ms; %zu kept, %zu edges; seed %llu\n", target->name,
               inputs, seconds, (double)s->slowest_ns / 1e6, (size_t)s->kept, (size_t)s->edges,
               (unsigned long long)seed);
    } else {
        char *path = save(data, bytes);
        show_log(log, summary, sizeof summary);
        printf("not ok - fuzz %s: %s%s, after %llu inputs; again: build/fuzz/fuzz %s %s\n", target->name, why, summary,
               inputs, target->name, path);
        free(path);
    }
    fflush(stdout);
    return !why;
}

/* Inputs of the past, each by itself. */
static bool replay(char **files, int count) {
    bool good = true;
    static char log[300];
    snprintf(log, sizeof log, "build/fuzz/%s.log.%d", target->name, (int)getpid());
    target->seeds();
    for (int i = 0; i < count; i++) {
        char summary[300] = "", *data;
        nmk_err e;
        if (nmk_file_read(&data, &s->batch_at[1], files[i], MOST_INPUT, &e))
            fprintf(stderr, "fuzz: %s\n", e.text), exit(2);
        size_t bytes = s->batch_at[1];
        begin_watching();
        memcpy(s->batch_bytes, data, bytes);
        s->batch_at[1] = bytes, s->batch = 1;
        free(data);
        pid_t pid = fork_runner();
        if (!pid) begin_running(log), run_batch(0, 1);
        const char *why = watch(pid, 0);
        clean_after(pid);
        if (!why && s->leaked) why = "leaks";
        if (why) show_log(log, summary, sizeof summary), good = false;
        printf("%s - fuzz %s: %s%s%s%s\n", why ? "not ok" : "ok", target->name, files[i], why ? ": " : "",
               why ? why : "", summary);
        fflush(stdout);
    }
    unlink(log);
    return good;
}

static const fuzz_target *find(const char *name) {
    for (int i = 0; i < TARGETS; i++)
        if (!strcmp(targets[i]->name, name)) return targets[i];
    return NULL;
}

int main(int argc, char **argv) {
    double seconds = 60;
    uint64_t seed = 1;
    int i = 1;
    bool good = true;
    for (; i + 1 < argc && !strncmp(argv[i], "--", 2); i += 2) {
        if (!strcmp(argv[i], "--seconds"))
            seconds = atof(argv[i + 1]);
        else if (!strcmp(argv[i], "--seed"))
            seed = strtoull(argv[i + 1], NULL, 10);
        else
            break;
    }
    if (argc == 2 && !strcmp(argv[1], "--list")) {
        for (i = 0; i < TARGETS; i++) puts(targets[i]->name);
        return 0;
    }
    if (i == argc || !(target = find(argv[i]))) {
        fprintf(stderr, "usage: fuzz [--seconds N] [--seed S] TARGET... | TARGET FILE... | --list\n");
        return 2;
    }
    mkdir("build", 0777), mkdir("build/fuzz", 0777);
    s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (s == MAP_FAILED) perror("mmap"), exit(2);
    if (i + 1 < argc && !find(argv[i + 1])) return replay(argv + i + 1, argc - i - 1) ? 0 : 1;
    for (; i < argc; i++) {
        if (!(target = find(argv[i]))) fprintf(stderr, "fuzz: no target %s\n", argv[i]), exit(2);
        good &= fuzz(seconds, seed);
    }
    return good ? 0 : 1;
}
