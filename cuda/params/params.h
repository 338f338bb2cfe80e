// All kernel parameters. The headers are generated from src/backend/cuda/params.
#pragma once

#include "common.h"
#include "ht.h"
#include "ht_nodes.h"
#include "ll.h"
