/* The reference of the read benchmarks: a bare io_uring loop over a list of extents, nothing else.
 *
 *   bare_ring QUEUE FIXED BLOCK [DUMP] < extents        lines "path offset length", in the order to read
 *
 * Reads every extent in pieces of at most BLOCK bytes with O_DIRECT into one pre-faulted arena of huge pages, QUEUE
 * requests in flight, with registered buffers when FIXED is 1. Prints seconds, CPU seconds, bytes, and the seconds until
 * each extent was read whole. Afterwards writes what it read to DUMP. Build: cc -O2 bare_ring.c -o bare_ring -luring
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <liburing.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define SLICE (1UL << 30)

struct extent { int fd, line; uint64_t offset, length, at; };

static size_t left[65536];
static double read_s[65536];

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }

static double cpu(void) {
    struct rusage u; getrusage(RUSAGE_SELF, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static void die(const char *what) { perror(what); exit(1); }

int main(int argc, char **argv) {
    if (argc != 4 && argc != 5) { fprintf(stderr, "usage: bare_ring QUEUE FIXED BLOCK [DUMP] < extents\n"); return 2; }
    int queue = atoi(argv[1]), fixed = atoi(argv[2]);
    uint64_t block = strtoull(argv[3], 0, 10);
    struct extent *list = malloc(sizeof *list * 1000000);
    size_t count = 0; uint64_t total = 0;
    char path[4096], last[4096] = ""; int fd = -1, lines = 0; uint64_t offset, length;
    while (scanf("%4095s %lu %lu", path, &offset, &length) == 3) {
        if (strcmp(path, last)) { fd = open(path, O_RDONLY | O_DIRECT); if (fd < 0) die(path); strcpy(last, path); }
        for (uint64_t done = 0; done < length; done += block) {
            uint64_t piece = length - done < block ? length - done : block;
            list[count++] = (struct extent){fd, lines, offset + done, piece, total}; total += piece; left[lines]++;
        }
        if (++lines == 65536) { fprintf(stderr, "too many extents\n"); return 2; }
    }
    char *arena = mmap(0, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (arena == MAP_FAILED) die("mmap");
    madvise(arena, total, MADV_HUGEPAGE);
    memset(arena, 1, total);
    struct io_uring ring; struct io_uring_params params = {.flags = IORING_SETUP_SINGLE_ISSUER | (1U << 13)};
    if (io_uring_queue_init_params(queue, &ring, &params) < 0) {
        memset(&params, 0, sizeof params);
        if (io_uring_queue_init_params(queue, &ring, &params) < 0) die("io_uring");
    }
    if (fixed) {
        struct iovec slices[64]; int n = (total + SLICE - 1) / SLICE;
        for (int i = 0; i < n; i++)
            slices[i] = (struct iovec){arena + i * SLICE, i == n - 1 ? total - i * SLICE : SLICE};
        int failed = io_uring_register_buffers(&ring, slices, n);
        if (failed < 0) { fprintf(stderr, "register: %s\n", strerror(-failed)); return 1; }
    }
    double start = now(), start_cpu = cpu();
    size_t next = 0, done = 0; int flying = 0;
    while (done < count) {
        while (next < count && flying < queue) {
            struct io_uring_sqe *entry = io_uring_get_sqe(&ring); struct extent *e = &list[next];
            if (fixed) io_uring_prep_read_fixed(entry, e->fd, arena + e->at, e->length, e->offset, e->at / SLICE);
            else io_uring_prep_read(entry, e->fd, arena + e->at, e->length, e->offset);
            io_uring_sqe_set_data64(entry, next++); flying++;
        }
        if (io_uring_submit_and_wait(&ring, 1) < 0) die("submit");
        struct io_uring_cqe *got; unsigned head, n = 0;
        io_uring_for_each_cqe(&ring, head, got) {
            if (got->res != (int)list[got->user_data].length) { fprintf(stderr, "short read %d\n", got->res); return 1; }
            int line = list[got->user_data].line;
            if (!--left[line]) read_s[line] = now() - start;
            n++; done++; flying--;
        }
        io_uring_cq_advance(&ring, n);
    }
    printf("{\"seconds\": %.6f, \"cpu_s\": %.6f, \"bytes\": %lu, \"latencies_s\": [", now() - start, cpu() - start_cpu, total);
    for (int i = 0; i < lines; i++) printf(i ? ", %.6f" : "%.6f", read_s[i]);
    printf("]}\n");
    if (argc == 5) {
        FILE *dump = fopen(argv[4], "w");
        if (!dump || fwrite(arena, 1, total, dump) != total || fclose(dump)) die(argv[4]);
    }
    return 0;
}
