// Compares mem.c, compiled with the prefix my_, with the definitions: every length up to 300, every overlap, every
// place of a difference.

#include <stddef.h>
#include <stdio.h>

void *my_memmove(void *to, const void *from, size_t n);
void *my_memcpy(void *to, const void *from, size_t n);
int my_memcmp(const void *left, const void *right, size_t n);

enum { LENGTH = 300, SPACE = 3 * LENGTH };

static int sign(int number) { return (number > 0) - (number < 0); }

static int moves(size_t length, size_t from, size_t to, void *(*move)(void *, const void *, size_t)) {
  unsigned char actual[SPACE], expected[SPACE];
  for (int i = 0; i < SPACE; i++) actual[i] = expected[i] = (unsigned char)(i * 7 + (i >> 8));
  for (size_t i = 0; i < length; i++) expected[to + i] = (unsigned char)((from + i) * 7 + ((from + i) >> 8));
  void *result = move(actual + to, actual + from, length);
  for (int i = 0; i < SPACE; i++) {
    if (actual[i] != expected[i]) return 0;
  }
  return result == actual + to;
}

static int compares(size_t length, size_t place, int left, int right) {
  unsigned char a[LENGTH + 1], b[LENGTH + 1];
  // Bytes behind the difference, and behind the end, must not count.
  for (size_t i = 0; i <= length; i++) a[i] = b[i] = (unsigned char)(i * 13);
  for (size_t i = place + 1; i <= length; i++) a[i] = (unsigned char)(255 - b[i]);
  a[place] = (unsigned char)left, b[place] = (unsigned char)right;
  return sign(my_memcmp(a, b, length)) == (place < length ? sign(left - right) : 0);
}

int main(void) {
  static const int bytes[] = {0, 1, 127, 128, 255};
  for (size_t length = 0; length <= LENGTH; length++) {
    for (size_t to = 0; to <= 2 * LENGTH; to++) {
      if (!moves(length, LENGTH, to, my_memmove)) return printf("memmove: length %zu, to %zu\n", length, to), 1;
      size_t distance = to > LENGTH ? to - LENGTH : LENGTH - to;
      if (distance >= length && !moves(length, LENGTH, to, my_memcpy)) return printf("memcpy: length %zu\n", length), 1;
    }
    for (size_t place = 0; place <= length; place++) {
      for (int i = 0; i < 25; i++) {
        // Equal bytes are no difference; the place at the end of the ranges has the case of equal ranges.
        if (i / 5 == i % 5 && place < length) continue;
        if (!compares(length, place, bytes[i / 5], bytes[i % 5])) {
          return printf("memcmp: length %zu, place %zu\n", length, place), 1;
        }
      }
    }
  }
  return 0;
}
