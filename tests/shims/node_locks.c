/* Preloaded: flock where it is absent (FLOCK=absent), or ends at the node (FLOCK=local).
 *
 * A local flock locks a shadow file in FLOCK_FOLDER, which is named by the node and the file.
 * The node is NODE, or in a job of Slurm SLURMD_NODENAME.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* The shadow's descriptor lives as long as the file's: the next file of this number replaces it. */
static int shadows[4096];

int flock(int descriptor, int operation) {
    int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
    const char *mode = getenv("FLOCK"), *node = getenv("SLURMD_NODENAME");
    struct stat found;
    char path[512];
    if (mode && !strcmp(mode, "absent")) {
        errno = ENOSYS;
        return -1;
    }
    if (!mode || fstat(descriptor, &found)) return real(descriptor, operation);
    if (!node) node = getenv("NODE") ? getenv("NODE") : "login";
    snprintf(path, sizeof path, "%s/%s-%lu", getenv("FLOCK_FOLDER"), node, found.st_ino);
    if (shadows[descriptor]) close(shadows[descriptor]);
    shadows[descriptor] = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    return real(shadows[descriptor], operation);
}

int close(int descriptor) {
    int (*real)(int) = dlsym(RTLD_NEXT, "close");
    if (descriptor >= 0 && descriptor < 4096 && shadows[descriptor]) {
        real(shadows[descriptor]);
        shadows[descriptor] = 0;
    }
    return real(descriptor);
}
