package main

import (
	"context"
	"os"
	_ "time/tzdata" // time zones for CronJobs

	"go.etcd.io/etcd/server/v3/etcdmain"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectlcmd "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func etcdMain()              { etcdmain.Main(os.Args) }
func apiserverMain()         { os.Exit(cli.Run(apiserver.NewAPIServerCommand())) }
func controllerManagerMain() { os.Exit(cli.Run(controllermanager.NewControllerManagerCommand())) }
func schedulerMain()         { os.Exit(cli.Run(scheduler.NewSchedulerCommand())) }
func proxyMain()             { os.Exit(cli.Run(proxy.NewProxyCommand())) }
func kubeletMain()           { os.Exit(cli.Run(kubelet.NewKubeletCommand(context.Background()))) }

func kubectlMain() {
	logs.GlogSetter(kubectlcmd.GetLogVerbosity(os.Args)) // nolint:errcheck
	if err := cli.RunNoErrOutput(kubectlcmd.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err)
	}
}
