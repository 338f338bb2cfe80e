# A network plugin for NCCL and what tests it: part of ../Makefile.
#   $(OUT)/lib/libnccl-net-ep-test.so   the plugin, which needs no other library
#   $(OUT)/net_plugin/selftest          moves messages over it without NCCL
#   $(OUT)/gpu/net_exchange             NCCL over it, on GPUs
net_plugin    := $(OUT)/lib/libnccl-net-ep-test.so
net_objects   := $(call object,net_plugin/plugin.c net_plugin/connection.c)
net_log       := $(call object,net_plugin/log.c)
net_selftest  := $(call object,$(sort $(wildcard net_plugin/selftest/*.c)))
net_exchange  := $(call object,net_plugin/exchange.c)

.PHONY: net-plugin
net-plugin: $(net_plugin) $(OUT)/net_plugin/selftest
host: net-plugin
gpu: $(net_plugin) $(OUT)/gpu/net_exchange

$(net_objects): private common += -fPIC -fvisibility=hidden
-include $(net_objects:.o=.d) $(net_log:.o=.d) $(net_selftest:.o=.d) $(net_exchange:.o=.d)

$(net_plugin): $(net_objects) $(OUT)/flags
	@mkdir -p $(@D)
	$(call quiet,LINK $@)$(CC) $(sanitizer) -shared -Wl,-soname,$(@F) -o $@ $(net_objects)
$(OUT)/net_plugin/selftest: $(net_selftest) $(net_log) $(OUT)/flags
	@mkdir -p $(@D)
	$(call quiet,LINK $@)$(CC) $(sanitizer) -o $@ $(net_selftest) $(net_log) -ldl
$(OUT)/gpu/net_exchange: $(net_exchange) $(net_log) $(harness) $(OUT)/flags $(OUT)/stub/libnccl.so
	@mkdir -p $(@D)
	$(call quiet,LINK $@)$(CC) -o $@ $(filter %.o,$^) $(link_gpu)
