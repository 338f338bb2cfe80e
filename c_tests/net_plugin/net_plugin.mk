# A network plugin for NCCL, which needs no other library: part of ../Makefile.
net_plugin    := $(OUT)/lib/libnccl-net-ep-test.so
net_objects   := $(call object,net_plugin/plugin.c)

.PHONY: net-plugin
net-plugin: $(net_plugin)
host gpu: net-plugin

$(net_objects): private common += -fPIC -fvisibility=hidden
-include $(net_objects:.o=.d)

$(net_plugin): $(net_objects) $(OUT)/flags
	@mkdir -p $(@D)
	$(call quiet,LINK $@)$(CC) $(sanitizer) -shared -Wl,-soname,$(@F) -o $@ $(net_objects)
