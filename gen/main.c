/* nmkgen: a Lua 5.4 interpreter with the generator's own modules and what Lua lacks.
 *
 * Owns: the process (arguments, exit status, locale "C"), module yaml (text -> tree with positions, by libyaml) and
 * module host (files).  Does not know: what a spec or a stage is; that starts at gen/nmkgen.lua.
 *
 * Exit status: 0 done, 1 mistakes in the input, 2 wrong use of the command, 3 a fault of nmkgen itself. */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <locale.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <yaml.h>

enum { EXIT_INTERNAL = 3, MAX_DEPTH = 64, MAX_FILE_BYTES = 16 << 20 };

/* Of a YAML file, and how deep it may be that libyaml looks at it at all: its time grows with the square of the anchors
 * and with tokens times depth. */
enum { MAX_YAML_BYTES = 256 << 10, MAX_YAML_DEPTH = 500 };

/* ---- memory ---- */

/* Lua's memory.  A run makes a million small objects and touches a hundred megabytes once: with malloc, its bookkeeping
 * and page faults are a third of the time (perf record build/nmkgen specs/north-mini-code.yaml).  Blocks come from the
 * top of large chunks that ask for huge pages, and a freed block waits for the next one of its class; Lua says how
 * large a block is, so it needs no header.  Nothing goes back before the process ends. */
enum { GRAIN = 16, SMALL = 512, CLASSES = SMALL / GRAIN + 4 * 64, HUGE_PAGE = 2 << 20, CHUNK = 32 * HUGE_PAGE };

/* Lua looks for garbage when there is so much memory in per cent of what was alive: little of what a run makes is. */
enum { GC_PAUSE = 400 };

typedef struct {
    char *at, *end;
    void *freed[CLASSES]; /* lists, linked through their first word */
    size_t used, most;    /* bytes of blocks that are taken, and may be; 0: any */
} memory;

/* Rounds up to what blocks of that size have: multiples of GRAIN, or four sizes from one power of two to the next. */
static size_t block_size(size_t size) {
    size_t step = size <= SMALL ? GRAIN : (size_t)1 << (61 - __builtin_clzll(size - 1));
    return (size + step - 1) & ~(step - 1);
}

static int class_of(size_t block) {
    if (block <= SMALL) return (int)(block / GRAIN);
    int shift = 61 - __builtin_clzll(block);
    return SMALL / GRAIN + 4 * shift + (int)(block >> shift & 3);
}

static void *take(memory *m, size_t block) {
    void **head = &m->freed[class_of(block)];
    if (*head) {
        void *p = *head;
        memcpy(head, p, sizeof p);
        return p;
    }
    if (block > (size_t)(m->end - m->at)) {
        size_t bytes = (block > CHUNK ? block : CHUNK) + HUGE_PAGE;
        char *chunk = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (chunk == MAP_FAILED) return NULL;
        madvise(chunk, bytes, MADV_HUGEPAGE); /* a hint: without it, only slower */
        m->at = chunk + (HUGE_PAGE - (uintptr_t)chunk % HUGE_PAGE) % HUGE_PAGE;
        m->end = chunk + bytes;
    }
    void *p = m->at;
    m->at += block;
    return p;
}

/* A lua_Alloc: see Lua's manual. */
static void *allocate(void *ud, void *old, size_t old_size, size_t size) {
    size_t had = old ? block_size(old_size) : 0, block = block_size(size);
    if (had == block) return old;
    memory *m = ud;
    bool fits = !m->most || block <= had || m->used + (block - had) <= m->most;
    void *p = size && fits ? take(m, block) : NULL;
    if (size && !p) return had > block ? old : NULL; /* a block may always shrink */
    m->used += block - had;
    if (had) {
        if (p) memcpy(p, old, old_size < size ? old_size : size);
        void **head = &m->freed[class_of(had)];
        memcpy(old, head, sizeof *head);
        *head = old;
    }
    return p;
}

/* host.bound(bytes): from now on so much more memory than now, or Lua's "not enough memory"; 0: no bound. */
static int host_bound(lua_State *L) {
    void *heap;
    lua_getallocf(L, &heap);
    memory *m = heap;
    size_t bytes = (size_t)luaL_checkinteger(L, 1);
    m->most = bytes ? m->used + bytes : 0;
    return 0;
}

/* ---- files ---- */

/* Pushes the file's bytes; or pushes nothing and returns an errno value.  A folder is an error, not an empty file. */
static int push_file(lua_State *L, const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) return errno;
    struct stat st;
    int rc = fstat(fileno(f), &st) ? errno : S_ISDIR(st.st_mode) ? EISDIR : st.st_size > MAX_FILE_BYTES ? EFBIG : 0;
    if (!rc) {
        luaL_Buffer b;
        luaL_buffinit(L, &b);
        size_t n, total = 0;
        do {
            n = fread(luaL_prepbuffer(&b), 1, LUAL_BUFFERSIZE, f);
            luaL_addsize(&b, n);
            total += n;
        } while (n && total <= MAX_FILE_BYTES);
        luaL_pushresult(&b);
        rc = ferror(f) ? EIO : total > MAX_FILE_BYTES ? EFBIG : 0;
        if (rc) lua_pop(L, 1);
    }
    fclose(f);
    return rc;
}

/* host.read(path) -> text | nil, reason */
static int host_read(lua_State *L) {
    int rc = push_file(L, luaL_checkstring(L, 1));
    if (!rc) return 1;
    lua_pushnil(L);
    lua_pushstring(L, strerror(rc));
    return 2;
}

/* host.part(path, offset, count) -> at most `count` bytes from `offset`, size of the file | nil, reason */
static int host_part(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    lua_Integer offset = luaL_checkinteger(L, 2), count = luaL_checkinteger(L, 3);
    struct stat st;
    FILE *f = count < 0 || count > MAX_FILE_BYTES ? (errno = EFBIG, NULL) : fopen(path, "rb");
    int rc = !f || fstat(fileno(f), &st) ? errno : S_ISDIR(st.st_mode) ? EISDIR : 0;
    if (!rc && fseeko(f, (off_t)offset, SEEK_SET)) rc = errno;
    if (!rc) {
        luaL_Buffer b;
        char *to = luaL_buffinitsize(L, &b, (size_t)count);
        size_t n = fread(to, 1, (size_t)count, f);
        rc = ferror(f) ? EIO : 0;
        luaL_pushresultsize(&b, n);
    }
    if (f) fclose(f);
    if (!rc) {
        lua_pushinteger(L, (lua_Integer)st.st_size);
        return 2;
    }
    lua_pushnil(L);
    lua_pushstring(L, strerror(rc));
    return 2;
}

/* Makes every missing folder above `path`, which is changed and restored.  0 or errno. */
static int make_folders(char *path) {
    for (char *p = path + 1; *p; p++) {
        if (*p != '/') continue;
        *p = 0;
        int rc = mkdir(path, 0777) && errno != EEXIST ? errno : 0;
        *p = '/';
        if (rc) return rc;
    }
    return 0;
}

static int fail_path(lua_State *L, const char *path, int rc) {
    lua_pushnil(L);
    lua_pushfstring(L, "%s: %s", path, strerror(rc));
    return 2;
}

static int write_file(const char *path, const char *text, size_t n) {
    FILE *f = fopen(path, "wb");
    if (!f) return errno;
    int rc = fwrite(text, 1, n, f) == n ? 0 : errno ? errno : EIO;
    if (fclose(f) && !rc) rc = errno;
    return rc;
}

/* host.write({ {path=, text=}, ... }) -> true | nil, reason.  All files are complete under a temporary name before the
 * first one gets its own, so a full disk or a missing right leaves every old file as it was. */
static int host_write(lua_State *L) {
    luaL_checktype(L, 1, LUA_TTABLE);
    int n = (int)luaL_len(L, 1), rc = 0, i, made = 0;
    lua_createtable(L, n, 0); /* 2: temporary names */
    for (i = 1; i <= n && !rc; i++) {
        lua_geti(L, 1, i);
        lua_getfield(L, -1, "path");
        lua_getfield(L, -2, "text");
        size_t bytes;
        const char *path = luaL_checkstring(L, -2), *text = luaL_checklstring(L, -1, &bytes);
        const char *temp = lua_pushfstring(L, "%s.tmp%d", path, (int)getpid());
        char *own = memcpy(lua_newuserdatauv(L, strlen(temp) + 1, 0), temp, strlen(temp) + 1);
        rc = make_folders(own);
        if (!rc) {
            made = i;
            rc = write_file(temp, text, bytes);
        }
        lua_pushvalue(L, -2);
        lua_seti(L, 2, i);
        lua_settop(L, 2);
    }
    int failed = rc ? i - 1 : 0;
    for (i = 1; i <= made; i++) {
        lua_geti(L, 1, i);
        lua_getfield(L, -1, "path");
        lua_geti(L, 2, i);
        const char *path = lua_tostring(L, -2), *temp = lua_tostring(L, -1);
        if (rc) {
            remove(temp);
        } else if (rename(temp, path)) {
            rc = errno, failed = i;
            remove(temp);
        }
        lua_settop(L, 2);
    }
    if (!rc) {
        lua_pushboolean(L, 1);
        return 1;
    }
    lua_geti(L, 1, failed);
    lua_getfield(L, -1, "path");
    return fail_path(L, lua_tostring(L, -1), rc);
}

static int by_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name); /* not alphasort: that follows the locale */
}

/* host.list(folder) -> sorted names without those that begin with a dot | nil, reason */
static int host_list(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    struct dirent **entries;
    int n = scandir(path, &entries, NULL, by_name);
    if (n < 0) return fail_path(L, path, errno);
    lua_createtable(L, n, 0);
    for (int i = 0, k = 0; i < n; i++) {
        if (entries[i]->d_name[0] != '.') {
            lua_pushstring(L, entries[i]->d_name);
            lua_seti(L, -2, ++k);
        }
        free(entries[i]);
    }
    free(entries);
    return 1;
}

/* host.realpath(path) -> absolute path | nil, reason */
static int host_realpath(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    char *real = realpath(path, NULL);
    if (!real) return fail_path(L, path, errno);
    lua_pushstring(L, real);
    free(real);
    return 1;
}

/* host.now() -> seconds of a clock that never goes back */
static int host_now(lua_State *L) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    lua_pushnumber(L, (lua_Number)now.tv_sec + 1e-9 * (lua_Number)now.tv_nsec);
    return 1;
}

/* ---- yaml ---- */

typedef struct {
    lua_State *L;
    yaml_document_t *doc;
    const char *file;
    int nodes;  /* stack index: document node id -> converted node, false while it is being converted */
    int errors; /* stack index: list of mistakes that leave a tree */
} reader;

/* Appends {file, line, col, message} to the list at `list`; takes the message from the top of the stack. */
static void add_error(lua_State *L, int list, const char *file, size_t line, size_t col) {
    lua_createtable(L, 0, 4);
    lua_insert(L, -2);
    lua_setfield(L, -2, "message");
    lua_pushstring(L, file);
    lua_setfield(L, -2, "file");
    lua_pushinteger(L, (lua_Integer)line + 1);
    lua_setfield(L, -2, "line");
    lua_pushinteger(L, (lua_Integer)col + 1);
    lua_setfield(L, -2, "col");
    lua_seti(L, list, luaL_len(L, list) + 1);
}

static int convert(reader *r, int id, int depth);

/* Reports a key that an earlier pair of the map has too.  seen: stack index of their lines, by key. */
static void check_key(reader *r, const yaml_node_pair_t *pair, int seen) {
    const yaml_node_t *key = yaml_document_get_node(r->doc, pair->key);
    if (key->type != YAML_SCALAR_NODE) {
        lua_pushliteral(r->L, "a key must be a plain word");
        add_error(r->L, r->errors, r->file, key->start_mark.line, key->start_mark.column);
        return;
    }
    lua_pushlstring(r->L, (const char *)key->data.scalar.value, key->data.scalar.length);
    lua_pushvalue(r->L, -1);
    if (lua_rawget(r->L, seen) == LUA_TNIL) {
        lua_pop(r->L, 1);
        lua_pushinteger(r->L, (lua_Integer)key->start_mark.line + 1);
        lua_rawset(r->L, seen);
        return;
    }
    lua_pushfstring(r->L, "%s: duplicate key, first given in line %I", (const char *)key->data.scalar.value,
                    (LUAI_UACINT)lua_tointeger(r->L, -1));
    add_error(r->L, r->errors, r->file, key->start_mark.line, key->start_mark.column);
    lua_pop(r->L, 2);
}

/* Pushes one node; node ids are shared by aliases, and so are their tables: an alias bomb costs nothing. */
static int convert(reader *r, int id, int depth) {
    lua_State *L = r->L;
    const yaml_node_t *node = yaml_document_get_node(r->doc, id);
    luaL_checkstack(L, 8, "yaml");
    if (lua_geti(L, r->nodes, id) == LUA_TTABLE) return 1;
    int looped = lua_isboolean(L, -1);
    lua_pop(L, 1);
    if (looped || depth > MAX_DEPTH) {
        if (looped)
            lua_pushliteral(L, "this anchor contains an alias of itself");
        else
            lua_pushfstring(L, "nested deeper than %d levels", MAX_DEPTH);
        add_error(L, r->errors, r->file, node->start_mark.line, node->start_mark.column);
        return 0;
    }
    lua_pushboolean(L, 0);
    lua_seti(L, r->nodes, id);

    lua_createtable(L, 0, 8);
    lua_pushstring(L, r->file);
    lua_setfield(L, -2, "file");
    lua_pushinteger(L, (lua_Integer)node->start_mark.line + 1);
    lua_setfield(L, -2, "line");
    lua_pushinteger(L, (lua_Integer)node->start_mark.column + 1);
    lua_setfield(L, -2, "col");
    const char *kind = node->type == YAML_SCALAR_NODE ? "scalar" : node->type == YAML_SEQUENCE_NODE ? "seq" : "map";
    lua_pushstring(L, kind);
    lua_setfield(L, -2, "kind");
    const char *usual = node->type == YAML_SCALAR_NODE     ? YAML_DEFAULT_SCALAR_TAG
                        : node->type == YAML_SEQUENCE_NODE ? YAML_DEFAULT_SEQUENCE_TAG
                                                           : YAML_DEFAULT_MAPPING_TAG;
    if (strcmp((const char *)node->tag, usual)) {
        lua_pushfstring(L, "tag %s is not understood, write the plain value", (const char *)node->tag);
        add_error(L, r->errors, r->file, node->start_mark.line, node->start_mark.column);
    }
    if (node->type == YAML_SCALAR_NODE) {
        lua_pushlstring(L, (const char *)node->data.scalar.value, node->data.scalar.length);
        lua_setfield(L, -2, "value");
        lua_pushstring(L, node->data.scalar.style == YAML_PLAIN_SCALAR_STYLE ? "plain" : "quoted");
        lua_setfield(L, -2, "style");
    } else if (node->type == YAML_SEQUENCE_NODE) {
        lua_newtable(L);
        const yaml_node_item_t *top = node->data.sequence.items.top;
        for (const yaml_node_item_t *item = node->data.sequence.items.start; item < top; item++)
            if (convert(r, *item, depth + 1)) lua_seti(L, -2, luaL_len(L, -2) + 1);
        lua_setfield(L, -2, "items");
    } else {
        lua_newtable(L); /* the lines of keys, under the items */
        lua_newtable(L);
        const yaml_node_pair_t *top = node->data.mapping.pairs.top;
        for (const yaml_node_pair_t *pair = node->data.mapping.pairs.start; pair < top; pair++) {
            check_key(r, pair, lua_gettop(L) - 1);
            lua_createtable(L, 0, 2);
            if (convert(r, pair->key, depth + 1)) lua_setfield(L, -2, "key");
            if (convert(r, pair->value, depth + 1)) lua_setfield(L, -2, "value");
            lua_seti(L, -2, luaL_len(L, -2) + 1);
        }
        lua_setfield(L, -3, "items");
        lua_pop(L, 1);
    }
    lua_pushvalue(L, -1);
    lua_seti(L, r->nodes, id);
    return 1;
}

/* Line and column of a byte; columns count characters as libyaml does. */
static void locate(const char *text, size_t offset, size_t *line, size_t *col) {
    *line = *col = 0;
    for (size_t i = 0; i < offset; i++) {
        if (text[i] == '\n')
            *line += 1, *col = 0;
        else if (((unsigned char)text[i] & 0xc0) != 0x80)
            *col += 1;
    }
}

/* Pushes why the parser stopped and adds it to the errors. */
static void add_parser_error(reader *r, const yaml_parser_t *parser, const char *text, size_t size) {
    size_t line = parser->problem_mark.line, col = parser->problem_mark.column;
    const char *problem = parser->problem ? parser->problem : "out of memory";
    if (parser->error == YAML_READER_ERROR) {
        locate(text, parser->problem_offset < size ? parser->problem_offset : size, &line, &col);
        lua_pushfstring(r->L, "not UTF-8 text: %s", problem);
    } else if (parser->context) {
        lua_pushfstring(r->L, "%s, %s in line %I", problem, parser->context,
                        (LUAI_UACINT)parser->context_mark.line + 1);
    } else {
        lua_pushstring(r->L, problem);
    }
    add_error(r->L, r->errors, r->file, line, col);
}

/* Whether libyaml will read it in good time; adds a mistake if not. */
static int is_small(reader *r, const char *text, size_t size) {
    yaml_parser_t parser;
    yaml_event_t event;
    int depth = 0, ended = 0;
    if (size > MAX_YAML_BYTES) {
        lua_pushfstring(r->L, "more than %d bytes: no spec is that long", MAX_YAML_BYTES);
        add_error(r->L, r->errors, r->file, 0, 0);
        return 0;
    }
    if (!yaml_parser_initialize(&parser)) return luaL_error(r->L, "libyaml: out of memory");
    yaml_parser_set_encoding(&parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, size);
    while (!ended && depth <= MAX_YAML_DEPTH && yaml_parser_parse(&parser, &event)) {
        yaml_event_type_t type = event.type;
        depth += (type == YAML_SEQUENCE_START_EVENT || type == YAML_MAPPING_START_EVENT) -
                 (type == YAML_SEQUENCE_END_EVENT || type == YAML_MAPPING_END_EVENT);
        ended = type == YAML_STREAM_END_EVENT;
        if (depth > MAX_YAML_DEPTH) {
            lua_pushfstring(r->L, "nested deeper than %d levels", MAX_DEPTH);
            add_error(r->L, r->errors, r->file, event.start_mark.line, event.start_mark.column);
        }
        yaml_event_delete(&event);
    }
    yaml_parser_delete(&parser);
    return depth <= MAX_YAML_DEPTH; /* what else is wrong is said later */
}

/* yaml.parse(text, file) -> tree or nil, list of mistakes {file, line, col, message} (empty when all is well) */
static int parse(lua_State *L) {
    size_t size;
    const char *text = luaL_checklstring(L, 1, &size);
    const char *file = luaL_checkstring(L, 2);
    lua_settop(L, 2);
    lua_newtable(L); /* 3 */
    lua_newtable(L); /* 4 */
    yaml_parser_t parser;
    yaml_document_t doc, next;
    reader r = {.L = L, .doc = &doc, .file = file, .nodes = 4, .errors = 3};
    if (!is_small(&r, text, size)) {
        lua_pushnil(L);
        lua_pushvalue(L, 3);
        return 2;
    }
    if (!yaml_parser_initialize(&parser)) return luaL_error(L, "libyaml: out of memory");
    yaml_parser_set_encoding(&parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, size);
    int made = 0;
    if (!yaml_parser_load(&parser, &doc)) {
        add_parser_error(&r, &parser, text, size);
    } else {
        if (!yaml_document_get_root_node(&doc)) {
            lua_pushliteral(L, "the file is empty");
            add_error(L, 3, file, 0, 0);
        } else {
            made = convert(&r, 1, 0);
        }
        yaml_document_delete(&doc);
        if (made) {
            if (!yaml_parser_load(&parser, &next)) {
                add_parser_error(&r, &parser, text, size);
            } else {
                const yaml_node_t *root = yaml_document_get_root_node(&next);
                if (root) {
                    lua_pushliteral(L, "a second document begins here, only one is allowed");
                    add_error(L, 3, file, root->start_mark.line, root->start_mark.column);
                }
                yaml_document_delete(&next);
            }
        }
    }
    yaml_parser_delete(&parser);
    if (!made) lua_pushnil(L);
    lua_pushvalue(L, 3);
    return 2;
}

/* yaml.load(path [, file]) -> as parse, messages call it `file`; one that cannot be read is a mistake at 1:1. */
static int yaml_load(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    luaL_optstring(L, 2, path);
    lua_settop(L, 2);
    if (lua_isnil(L, 2)) {
        lua_pushvalue(L, 1);
        lua_replace(L, 2);
    }
    int rc = push_file(L, path);
    if (!rc) {
        lua_replace(L, 1);
        return parse(L);
    }
    lua_pushnil(L);
    lua_newtable(L);
    lua_pushfstring(L, "cannot be read: %s", strerror(rc));
    add_error(L, 4, lua_tostring(L, 2), 0, 0);
    return 2;
}

/* ---- the process ---- */

static const luaL_Reg HOST[] = {
    {"read", host_read}, {"part", host_part},         {"write", host_write}, {"list", host_list},
    {"now", host_now},   {"realpath", host_realpath}, {"bound", host_bound}, {NULL, NULL},
};

static const luaL_Reg YAML[] = {{"load", yaml_load}, {"parse", parse}, {NULL, NULL}};

static int open_host(lua_State *L) {
    luaL_newlib(L, HOST);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_setfield(L, -2, "root");
    return 1;
}

static int open_yaml(lua_State *L) {
    luaL_newlib(L, YAML);
    return 1;
}

/* Pushes the folder that holds gen/, templates/ and specs/: NMK_ROOT, else the parent of the program's own folder. */
static void push_root(lua_State *L) {
    const char *root = getenv("NMK_ROOT");
    if (root && *root) {
        lua_pushstring(L, root);
        return;
    }
    char path[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    path[n < 0 ? 0 : n] = 0;
    for (int up = 0; up < 2; up++) {
        char *slash = strrchr(path, '/');
        if (slash) *slash = 0;
    }
    lua_pushstring(L, *path ? path : ".");
}

static int traceback(lua_State *L) {
    const char *text = lua_tostring(L, 1);
    luaL_traceback(L, L, text ? text : luaL_tolstring(L, 1, NULL), 1);
    return 1;
}

/* Runs require("nmkgen").main(arguments) and returns its status. */
static int run(lua_State *L) {
    int argc = (int)lua_tointeger(L, 1);
    char **argv = lua_touserdata(L, 2);
    luaL_openlibs(L);
    push_root(L);
    int root = lua_gettop(L);
    const char *start = lua_pushfstring(L, "%s/gen/nmkgen.lua", lua_tostring(L, root));
    if (access(start, R_OK)) {
        fprintf(stderr, "nmkgen: there is no %s; NMK_ROOT names the folder that holds gen/\n", start);
        lua_pushinteger(L, EXIT_INTERNAL);
        return 1;
    }
    lua_getglobal(L, "package");
    lua_pushfstring(L, "%s/gen/?.lua;%s/?.lua", lua_tostring(L, root), lua_tostring(L, root));
    lua_setfield(L, -2, "path");
    lua_pushliteral(L, "");
    lua_setfield(L, -2, "cpath");
    lua_getfield(L, -1, "preload");
    lua_pushvalue(L, root);
    lua_pushcclosure(L, open_host, 1);
    lua_setfield(L, -2, "host");
    lua_pushcfunction(L, open_yaml);
    lua_setfield(L, -2, "yaml");

    lua_getglobal(L, "require");
    lua_pushliteral(L, "nmkgen");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "main");
    lua_createtable(L, argc, 0);
    for (int i = 1; i < argc; i++) {
        lua_pushstring(L, argv[i]);
        lua_seti(L, -2, i);
    }
    lua_call(L, 1, 1);
    return 1;
}

/* A state as run needs it; NULL: there is no memory. */
static lua_State *new_state(void) {
    setlocale(LC_ALL, "C");
    static memory heap;
    lua_State *L = lua_newstate(allocate, &heap);
    if (L) lua_gc(L, LUA_GCINC, GC_PAUSE, 0, 0);
    return L;
}

/* The whole command; its exit status. */
static int command(lua_State *L, int argc, char **argv) {
    lua_settop(L, 0);
    lua_pushcfunction(L, traceback);
    lua_pushcfunction(L, run);
    lua_pushinteger(L, argc);
    lua_pushlightuserdata(L, argv);
    int status = EXIT_INTERNAL;
    if (lua_pcall(L, 2, 1, 1) != LUA_OK)
        fprintf(stderr, "nmkgen: internal error: %s\n", lua_tostring(L, -1));
    else
        status = (int)lua_tointeger(L, -1);
    if (fflush(stdout) || ferror(stdout)) {
        fprintf(stderr, "nmkgen: cannot write to standard output: %s\n", strerror(errno));
        if (!status) status = 1;
    }
    return status;
}

int main(int argc, char **argv) {
    lua_State *L = new_state();
    if (!L) {
        fputs("nmkgen: out of memory\n", stderr);
        return EXIT_INTERNAL;
    }
    return command(L, argc, argv); /* no lua_close: the process ends, and exit closes what is open */
}
