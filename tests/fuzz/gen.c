/* nmkgen as a program.  spec: a model's YAML; ops: an op file; init: a checkpoint's folder.  It ends with 0, or with 1 and
 * messages that name a file; a fault of its own, a crash, a file half written or one written after a mistake is wrong.
 *
 * Every input has a process of its own, forked from one that has read the generator's modules and the ops already: that
 * is half of what a run takes. */
#define _GNU_SOURCE /* pipe2 */
#include "fuzz.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "util.h"

#define main nmkgen_main
int nmkgen_main(int argc, char **argv);
#include "../../gen/main.c"
#undef main

enum { SECONDS = 20, MOST_MIB = 1500 };

static lua_State *ready;

/* Ops are read once more by who asks twice: what became of the first ones is not known. */
static const char keep_ops[] = "local ops, host = require('ops'), require('host')\n"
                               "local load, kept = ops.load, {}\n"
                               "local function key(columns) return ops.is_wide(columns or ops.TILE_COLUMNS) end\n"
                               "for _, columns in ipairs({ 8, 64 }) do\n"
                               "  kept[key(columns)] = load(host.root, require('diag').new(), columns)\n"
                               "end\n"
                               "function ops.load(root, diag, columns)\n"
                               "  local known = kept[key(columns)]\n"
                               "  kept[key(columns)] = nil\n"
                               "  return known or load(root, diag, columns)\n"
                               "end\n";

/* root: of the folders that nmkgen reads; with_ops: they are those of each input. */
static void begin_nmkgen(const char *root, bool with_ops) {
    static char *arguments[] = {"nmkgen", "--version", NULL};
    setenv("NMK_ROOT", root, 1);
    ready = new_state();
    if (!ready || command(ready, 2, arguments)) fuzz_wrong("nmkgen does not start");
    if (with_ops && luaL_dostring(ready, keep_ops)) fuzz_wrong("ops: %s", lua_tostring(ready, -1));
    lua_gc(ready, LUA_GCCOLLECT);
    /* What a run allocates is to be new: a page that was there has to be copied first. */
    void *heap;
    lua_getallocf(ready, &heap);
    memory *m = heap;
    memset(m->freed, 0, sizeof m->freed), m->at = m->end;
}

static void begin_here(void) {
    char text[4096];
    if (!getcwd(text, sizeof text)) fuzz_wrong("no working folder");
    begin_nmkgen(text, true);
}

/* Its exit status; `said` gets what it wrote on standard error. */
static int run_nmkgen(const char *const *arguments, nmk_buf *said) {
    int pipes[2], status;
    struct rusage usage;
    char text[4096];
    if (pipe2(pipes, O_CLOEXEC)) fuzz_wrong("no pipe");
    pid_t pid = fork();
    if (pid < 0) fuzz_wrong("no process");
    if (!pid) {
        const struct rlimit limit = {SECONDS, SECONDS + 1};
        int none = open("/dev/null", O_WRONLY);
        dup2(none, 1), dup2(pipes[1], 2);
        setrlimit(RLIMIT_CPU, &limit);
        int count = 0;
        while (arguments[count]) count++;
        int rc = command(ready, count, (char **)(uintptr_t)arguments);
        fflush(stderr);
        _exit(rc);
    }
    close(pipes[1]);
    nmk_buf_puts(said, "");
    for (ssize_t n; (n = read(pipes[0], text, sizeof text)) > 0;) nmk_buf_add(said, text, (size_t)n);
    close(pipes[0]);
    if (wait4(pid, &status, 0, &usage) != pid) fuzz_wrong("lost a process");
    if (usage.ru_maxrss > MOST_MIB * 1024L) fuzz_wrong("%ld MiB of memory", usage.ru_maxrss / 1024);
    if (!WIFEXITED(status)) fuzz_wrong("signal %d (24: more than %d s): %s", WTERMSIG(status), SECONDS, said->data);
    return WEXITSTATUS(status);
}

static int entries(const char *path) {
    int count = 0;
    DIR *d = opendir(path);
    for (struct dirent *f; d && (f = readdir(d));) count += f->d_name[0] != '.';
    if (d) closedir(d);
    return count;
}

static void empty(const char *path) {
    DIR *d = opendir(path);
    for (struct dirent *f; d && (f = readdir(d));) {
        char *name = xasprintf("%s/%s", path, f->d_name);
        unlink(name);
        free(name);
    }
    if (d) closedir(d);
    rmdir(path);
}

/* Of a run that writes to `output`, or nowhere. */
static void judge(const char *const *arguments, const char *output) {
    nmk_buf said = {0};
    int status = run_nmkgen(arguments, &said);
    if (strstr(said.data, "Sanitizer") || strstr(said.data, "runtime error: ")) fuzz_wrong("%s", said.data);
    if (status != 0 && status != 1) fuzz_wrong("exit status %d: %s", status, said.data);
    if (status == 1) {
        /* An op's table is Lua: what its expressions may not do Lua says, behind the op's file and line. */
        static const char *const ours[] = {"traceback", "attempt to", "bad argument", ".lua:", "[string"};
        for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
            if (strstr(said.data, ours[i]) && strncmp(said.data, "templates/ops/", 14))
                fuzz_wrong("a message of Lua's: %s", said.data);
        if (!said.length || !strchr(said.data, ':')) fuzz_wrong("no message: %s", said.data);
    }
    int files = output ? entries(output) : 0;
    if (output && ((status == 1 && files) || (status == 0 && !files)))
        fuzz_wrong("exit status %d, and %d files", status, files);
    /* What it said, a line at a time and without the path. */
    for (char *line = said.data, *next; line && *line; line = next) {
        next = strchr(line, '\n');
        if (next) *next++ = 0;
        const char *what = strstr(line, ": ");
        fuzz_feature(what ? what : line);
    }
    if (status == 0) fuzz_feature("done");
    if (output) empty(output);
    nmk_buf_free(&said);
}

/* ---------------------------------------------------------------- specs */

static void run_spec(const char *data, size_t bytes) {
    char *spec = xasprintf("%s/x.yaml", fuzz_folder()), *output = xasprintf("%s/out", fuzz_folder());
    fuzz_write("x.yaml", data, bytes);
    switch (fuzz_below(6)) {
    case 0: judge((const char *[]){"nmkgen", spec, "-o", output, NULL}, output); break;
    case 1: judge((const char *[]){"nmkgen", "plan", "--estimate", spec, NULL}, NULL); break;
    case 2: judge((const char *[]){"nmkgen", spec, "--launch", "prefill", "-o", output, NULL}, output); break;
    default: judge((const char *[]){"nmkgen", "check", spec, NULL}, NULL);
    }
    free(spec), free(output);
}

static void spec_seeds(void) {
    fuzz_seed_files("tests/models/*.yaml");
    fuzz_seed_files("tests/gen/bad/*.yaml");
    fuzz_seed_files("specs/nmc-toy.yaml");
    fuzz_words_of("gen/{spec,family,insert}.lua");
    fuzz_words_of("specs/families/*.lua");
    for (const char *const *w =
             (const char *const[]){": ",
                                   "- ",
                                   "&a ",
                                   "*a",
                                   "[",
                                   "]",
                                   "{",
                                   "}",
                                   "null",
                                   "~",
                                   "true",
                                   ".inf",
                                   ".nan",
                                   "0x10",
                                   "1e400",
                                   "\"",
                                   "'",
                                   "\n  ",
                                   "\n",
                                   "# ",
                                   "!!str ",
                                   "<<: ",
                                   "? ",
                                   "| ",
                                   "%YAML 1.1\n",
                                   "---\n",
                                   "insert:\n  - op: logit_softcap\n    value: logits\n    with: { cap: 30.0 }\n",
                                   "columns: ",
                                   "ring_stages: ",
                                   "in_flight: ",
                                   "split: ",
                                   "exchange: validated",
                                   NULL};
         *w; w++)
        fuzz_word(*w);
}

const fuzz_target fuzz_spec = {"spec", spec_seeds, begin_here, run_spec, 4 << 10, 60000};

/* ---------------------------------------------------------------- ops */

static char *root;
static const char *const ops[] = {"residual", "clear_cuts", "o_proj", "residual_bias"};

static void link_to(const char *from, const char *name) {
    char *path = xasprintf("%s/%s", root, name), *top = realpath(from, NULL);
    if (symlink(top, path)) fuzz_wrong("no link %s", path);
    free(path), free(top);
}

/* A root of its own: all links, and templates/ops to write in. */
static void open_root(void) {
    root = xasprintf("%s/root", fuzz_folder());
    char *templates = xasprintf("%s/templates", root), *here = xasprintf("%s/ops", templates);
    mkdir(root, 0777), mkdir(templates, 0777), mkdir(here, 0777);
    free(templates), free(here);
    link_to("gen", "gen"), link_to("specs", "specs");
    for (int i = 0; i < 2; i++) {
        const char *folder = i ? "templates/ops" : "templates";
        DIR *d = opendir(folder);
        for (struct dirent *f; d && (f = readdir(d));) {
            if (f->d_name[0] == '.' || !strcmp(f->d_name, "ops")) continue;
            char *name = xasprintf("%s/%s", folder, f->d_name);
            link_to(name, name);
            free(name);
        }
        if (d) closedir(d);
    }
    begin_nmkgen(root, false);
}

/* The op that the input begins with the name of, in place of the real one. */
static void run_ops(const char *data, size_t bytes) {
    const char *line = memchr(data, '\n', bytes);
    int chosen = -1;
    for (int i = 0; line && i < (int)(sizeof ops / sizeof *ops); i++)
        if (strlen(ops[i]) == (size_t)(line - data) && !memcmp(ops[i], data, strlen(ops[i]))) chosen = i;
    if (chosen < 0) return;
    char *real = xasprintf("templates/ops/%s.cu", ops[chosen]), *path = xasprintf("%s/%s", root, real);
    unlink(path);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(line + 1, 1, bytes - (size_t)(line + 1 - data), f) != bytes - (size_t)(line + 1 - data) ||
        fclose(f))
        fuzz_wrong("%s", path);
    if (fuzz_below(4))
        judge((const char *[]){"nmkgen", "check",
                               chosen == 3 ? "tests/models/tiny-qwen2.yaml" : "tests/models/tiny-llama.yaml", NULL},
              NULL);
    else
        judge((const char *[]){"nmkgen", "ops", NULL}, NULL);
    unlink(path);
    link_to(real, real);
    free(real), free(path);
}

static void ops_seeds(void) {
    for (int i = 0; i < (int)(sizeof ops / sizeof *ops); i++) {
        nmk_err e;
        char *path = xasprintf("templates/ops/%s.cu", ops[i]), *text;
        size_t bytes;
        if (nmk_file_read(&text, &bytes, path, 1 << 20, &e)) fuzz_wrong("%s", e.text);
        nmk_buf b = {0};
        nmk_buf_printf(&b, "%s\n%s", ops[i], text);
        fuzz_seed(b.data, b.length);
        /* The table alone, where the mistakes are to be. */
        char *end = strstr(text, "@*/");
        if (end) {
            b.length = 0;
            nmk_buf_printf(&b, "%s\n%.*s//@device\n//@reference\n", ops[i], (int)(end + 4 - text), text);
            fuzz_seed(b.data, b.length);
        }
        free(path), free(text), nmk_buf_free(&b);
    }
    fuzz_words_of("gen/ops.lua");
    for (const char *const *w = (const char *const[]){"{",
                                                      "}",
                                                      ",",
                                                      " = ",
                                                      "\"",
                                                      "--",
                                                      "[[",
                                                      "]]",
                                                      "nil",
                                                      "true",
                                                      "1/0",
                                                      "0/0",
                                                      "math.huge",
                                                      "function() end",
                                                      "while true do end",
                                                      "error('x')",
                                                      "//@device",
                                                      "//@reference",
                                                      "//@test",
                                                      "/*@op",
                                                      "@*/",
                                                      "\"i32\"",
                                                      "\"bf16\"",
                                                      "os.exit(3)",
                                                      "..",
                                                      "#",
                                                      "setmetatable",
                                                      "a.b",
                                                      NULL};
         *w; w++)
        fuzz_word(*w);
}

const fuzz_target fuzz_ops = {"ops", ops_seeds, open_root, run_ops, 16 << 10, 60000};

/* ---------------------------------------------------------------- checkpoints */

static const char *const names[] = {"config.json", "model.safetensors", "model.safetensors.index.json",
                                    "generation_config.json"};

static void run_init(const char *data, size_t bytes) {
    char *output = xasprintf("%s/out/x.yaml", fuzz_folder()), *folder = xasprintf("%s/out", fuzz_folder()),
         *path = xasprintf("%s/model.safetensors", fuzz_folder()), *text;
    nmk_err e;
    size_t n;
    fuzz_write_parts(data, bytes, names, 4);
    /* Of a header, its length comes from here; and the file is as large as it may need to be. */
    if (!nmk_file_read(&text, &n, path, 1 << 20, &e)) {
        if (n && text[0] == '{') {
            nmk_buf b = {0};
            const uint64_t length = n;
            nmk_buf_add(&b, &length, 8), nmk_buf_add(&b, text, n);
            fuzz_write("model.safetensors", b.data, b.length);
            const char *size = strstr(text, "\"bytes\":\"");
            if (size && truncate(path, (off_t)(8 + n) + strtol(size + 9, NULL, 10) % (1 << 30))) fuzz_wrong("%s", path);
            nmk_buf_free(&b);
        }
        free(text);
    }
    judge((const char *[]){"nmkgen", "init", fuzz_folder(), "-o", output, "--name", "x", NULL}, folder);
    free(output), free(folder), free(path);
}

static void init_seeds(void) {
    static const char *const models[] = {"tiny-llama", "tiny-qwen2", "tiny-mixtral", "tiny-cohere2"};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        nmk_err e;
        char *path = xasprintf("tests/models/%s/config.json", models[i]),
             *weights = xasprintf("tests/models/%s/model.safetensors", models[i]), *text;
        size_t n;
        nmk_buf b = {0};
        if (nmk_file_read(&text, &n, path, 1 << 20, &e)) fuzz_wrong("%s", e.text);
        nmk_buf_printf(&b, "%%%%%%%% config.json\n%s", text);
        free(text);
        fuzz_seed(b.data, b.length);
        if (!nmk_file_read(&text, &n, weights, 64 << 20, &e)) {
            uint64_t length;
            memcpy(&length, text, 8);
            nmk_buf_printf(&b, "\n%%%%%%%% model.safetensors\n{\"__metadata__\":{\"bytes\":\"%zu\"},", n - 8 - length);
            nmk_buf_add(&b, text + 9, length - 1);
            free(text);
            fuzz_seed(b.data, b.length);
        }
        free(path), free(weights), nmk_buf_free(&b);
    }
    fuzz_seed_files("tests/gen/configs/*/config.json");
    fuzz_words_of("gen/{init,config,checkpoint}.lua");
    fuzz_words_of("specs/families/*.lua");
    for (const char *const *w = (const char *const[]){"null", "true", "{}", "[]", "-1", "1e300", "\"\"",
                                                      "\"bytes\":\"0\"", "%%%% model.safetensors\n", NULL};
         *w; w++)
        fuzz_word(*w);
}

const fuzz_target fuzz_init = {"init", init_seeds, begin_here, run_init, 64 << 10, 60000};
