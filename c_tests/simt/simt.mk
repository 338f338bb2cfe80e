# The kernels of cuda/ on the CPU: a further link of the programs, part of ../Makefile.
#   $(OUT)/simt/NAME                                with libncclep_simt.so for CUDA and NCCL
#   $(OUT)/simt/lib/libncclep_simt.so               the CPU stand-ins, a driver, the SIMT shim
#   $(OUT)/simt/lib/libncclep_simt_kernels.so       every kernel of cuda/, compiled by g++
#   $(OUT)/simt/lib/libncclep_simt_plain.so         those of cuda/ht as for chips without bulk copies
#   $(OUT)/simt/lib/selftest                        the shim's own test
#   $(OUT)/simt/host_path                           what calls cost the host, from host_path/
simt_lib      := $(OUT)/simt/lib
simt_programs := $(addprefix $(OUT)/simt/,$(programs))
# Beside the library cargo has put params/, the headers of the kernels' parameters.
# Nothing takes the place of the shim's own functions, so they may be parts of each other.
simt_flags     = -std=c++17 -fPIC -fno-semantic-interposition -ffp-contract=off -O2 -g1 $(warnings) \
                 -Isimt -I$(EP_LIBDIR) -isystem $(CUDA_HOME)/include -MMD -MP
simt_object    = $(patsubst simt/%.cpp,$(OUT)/obj/simt/%.o,$(sort $(wildcard $(1))))
simt_objects  := $(filter-out %/kernel_list.o,$(call simt_object,simt/*.cpp))
simt_tests    := $(call simt_object,simt/selftest/*.cpp)
# The one switch that compiles what is in cuda/ for a CPU.
cpu_build      = -DNCCL_EP_PRIMITIVE='"ptx_cpu.h"'
# Some test what the kernels include.
$(simt_tests): private simt_flags += -Wno-unknown-pragmas $(cpu_build)
host_path     := $(call object,$(sort $(wildcard simt/host_path/*.c)))

.PHONY: simt simt-compiler
simt: $(simt_programs) $(simt_lib)/libncclep_simt_kernels.so $(simt_lib)/libncclep_simt_plain.so \
      $(simt_lib)/selftest $(if $(SANITIZE),,$(OUT)/simt/host_path)

$(OUT)/obj/simt/%.o: simt/%.cpp $(OUT)/flags
	@mkdir -p $(@D)
	$(call quiet,CXX  $<)$(CXX) $(simt_flags) -c $< -o $@
-include $(simt_objects:.o=.d) $(simt_tests:.o=.d) $(host_path:.o=.d)

$(simt_lib)/libncclep_simt.so: $(simt_objects) $(HOSTSIM_LIBDIR)/libncclep_hostsim.a \
                               simt/exports.map
	@mkdir -p $(@D)
	$(call quiet,LINK $@)$(CXX) -shared -o $@ -Wl,-soname,$(@F) $(simt_objects) \
	    -Wl,--whole-archive $(HOSTSIM_LIBDIR)/libncclep_hostsim.a -Wl,--no-whole-archive \
	    -Wl,--gc-sections -Wl,--version-script=simt/exports.map '-Wl,-rpath,$$ORIGIN' \
	    -Wl,-z,defs -lpthread -ldl -lm

# All in one unit.
$(simt_lib)/kernels.cpp: simt_units := ../cuda/*.cu ../cuda/*/*.cu
$(simt_lib)/plain.cpp: simt_units := ../cuda/ht/*.cu
$(simt_lib)/kernels.cpp $(simt_lib)/plain.cpp: FORCE
	@mkdir -p $(@D)
	@printf '#include "%s"\n' $(abspath simt/kernel_list.cpp $(sort $(wildcard $(simt_units)))) > $@.new
	@cmp -s $@.new $@ || cp $@.new $@
	@rm $@.new

# nvcc does not mind comparing what CUDA's functions return, an int, with an unsigned number. What
# C++ leaves undefined (shifts, overflows, misaligned accesses) ends the program; what is null does so by itself, and
# tests of pointers, at each access, would take a quarter of the compiler's time. Optimised more, they take a third
# longer to compile and run no faster.
simt_kernel_compiler = $(CXX) $(simt_flags) -O1 -Wno-unknown-pragmas -Wno-sign-compare \
                       -fsanitize=undefined -fno-sanitize=null,pointer-overflow,object-size,vptr \
                       -fno-sanitize-recover=all $(cpu_build)
simt_kernel_link     = -shared -fsanitize=undefined -L$(simt_lib) -lncclep_simt \
                       '-Wl,-rpath,$$ORIGIN' -Wl,-z,defs
$(simt_lib)/kernels.o: $(simt_lib)/kernels.cpp $(OUT)/flags simt/simt.mk
	$(call quiet,CXX  $<)$(simt_kernel_compiler) -c $< -o $@
-include $(simt_lib)/kernels.d
$(simt_lib)/libncclep_simt_kernels.so: $(simt_lib)/kernels.o $(simt_lib)/libncclep_simt.so
	$(call quiet,LINK $@)$(CXX) -o $@ -Wl,-soname,$(@F) $< $(simt_kernel_link)
# One test only uses it: quick to compile rather than to run.
$(simt_lib)/libncclep_simt_plain.so: $(simt_lib)/plain.cpp $(simt_lib)/kernels.o
	$(call quiet,CXX  $@)$(simt_kernel_compiler) -O0 -DSIMT_WITHOUT_BULK_COPY -o $@ $< \
	    -Wl,-soname,$(@F) $(simt_kernel_link)
# For planted_bugs.py: what compiles other kernels, run in this folder.
simt-compiler:
	@echo $(simt_kernel_compiler)

# Kernels of programs, which have the CPU build's CUDA.
$(foreach name,$(programs),$(call object,$(CPU_$(name)))): private common += -Wno-unknown-pragmas -Isimt
$(foreach name,$(programs),$(call object,$(CPU_$(name)))): private system :=

link_simt = -L$(ep_libdir) -lnccl_ep $(call rpath,$(OUT)/simt,$(ep_libdir)) \
            -L$(simt_lib) -lncclep_simt $(call rpath,$(OUT)/simt,$(simt_lib)) $(link_common)
$(simt_programs): $(OUT)/simt/%: $$(call object,$$(SOURCES_$$*) $$(CPU_$$*)) $$(call shared_by,$$*) \
                  $(OUT)/flags $(simt_lib)/libncclep_simt.so
	@mkdir -p $(@D)
	$(call quiet,LINK $@)$(call linker,$*) -o $@ $(filter %.o,$^) $(LINK_$*) $(link_simt)

$(simt_lib)/selftest: $(simt_tests) $(simt_lib)/libncclep_simt.so
	$(call quiet,LINK $@)$(CXX) -o $@ $(simt_tests) -L$(simt_lib) -lncclep_simt \
	    '-Wl,-rpath,$$ORIGIN' -lpthread

# Its own functions stand before the shim's, so it exports them; and before a sanitizer's.
$(OUT)/simt/host_path: $(host_path) $(harness) $(OUT)/flags $(simt_lib)/libncclep_simt.so
	@mkdir -p $(@D)
	$(call quiet,LINK $@)$(CC) -rdynamic -o $@ $(filter %.o,$^) $(link_simt)
