// Messages of many bytes, which two ranks exchange in another way than small ones.
#ifndef C_TESTS_SUITES_TRANSPORT_LARGE_H_
#define C_TESTS_SUITES_TRANSPORT_LARGE_H_

#include "forked/ranks.h"

// All mixes of large and small messages between ranks with even and with odd numbers arrive.
void large_messages_arrive(DeathRank* self);

#endif  // C_TESTS_SUITES_TRANSPORT_LARGE_H_
