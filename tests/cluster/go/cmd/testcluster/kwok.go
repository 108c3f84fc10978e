package main

import (
	"fmt"

	"github.com/spf13/pflag"

	nodestages "sigs.k8s.io/kwok/kustomize/stage/node/fast"
	leasestages "sigs.k8s.io/kwok/kustomize/stage/node/heartbeat-with-lease"
	podstages "sigs.k8s.io/kwok/kustomize/stage/pod/fast"
	kwokconfig "sigs.k8s.io/kwok/pkg/config"
	kwok "sigs.k8s.io/kwok/pkg/kwok/cmd"
	kwoklog "sigs.k8s.io/kwok/pkg/log"
	kwoksignals "sigs.k8s.io/kwok/pkg/utils/signals"
)

func kwokMain() {
	// Kubernetes' packages put "version" into the global flag set, which cobra
	// adds to every command; kwok's own "version" flag is of another type.
	pflag.CommandLine = pflag.NewFlagSet("kwok", pflag.ExitOnError)
	flags := pflag.NewFlagSet("global", pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	flags.Usage = func() {}
	ctx := kwoksignals.SetupSignalContext()
	ctx, _ = kwoklog.InitFlags(ctx, flags)
	ctx, err := kwokconfig.InitFlags(ctx, flags)
	exitOn("kwok", err)
	cmd := kwok.NewCommand(ctx)
	cmd.PersistentFlags().AddFlagSet(flags)
	exitOn("kwok", cmd.ExecuteContext(ctx))
}

// kwokStagesMain prints kwok's own rules for nodes that turn ready at once and
// pods that run at once; kwok has none without a file of them (--config).
func kwokStagesMain() {
	for _, stage := range []string{
		nodestages.DefaultNodeInit, leasestages.DefaultNodeHeartbeatWithLease,
		podstages.DefaultPodReady, podstages.DefaultPodComplete, podstages.DefaultPodDelete,
	} {
		fmt.Println("---\n" + stage)
	}
}
