// Command testcluster is a multi-call binary: one executable that holds every
// program of a small Kubernetes cluster, so that the code they share is linked
// only once. The program to run is the first argument, or the name the binary
// was started under (a symbolic link called "kubectl" runs kubectl).
package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
)

// programs maps a program's name to its main function. Each main sees
// os.Args as if it were a program of its own.
var programs = map[string]func(){
	"containerd":              containerdMain,
	"coredns":                 corednsMain,
	"ctr":                     ctrMain,
	"etcd":                    etcdMain,
	"fake-dra-driver":         fakeDRADriverMain,
	"fake-gpu-plugin":         fakeGPUPluginMain,
	"helm":                    helmMain,
	"kube-apiserver":          apiserverMain,
	"kube-controller-manager": controllerManagerMain,
	"kube-proxy":              proxyMain,
	"kube-scheduler":          schedulerMain,
	"kubectl":                 kubectlMain,
	"kubelet":                 kubeletMain,
	"kwok":                    kwokMain,
	"kwok-stages":             kwokStagesMain,
	"policy-agent":            policyAgentMain,
	"registry":                registryMain,
	"volume-keeper":           volumeKeeperMain,
}

func main() {
	if run, ok := programs[filepath.Base(os.Args[0])]; ok {
		run()
		return
	}
	if len(os.Args) > 1 {
		if run, ok := programs[os.Args[1]]; ok {
			os.Args = os.Args[1:]
			run()
			return
		}
	}
	fmt.Fprintf(os.Stderr, "usage: %s PROGRAM [ARGUMENTS]\nprograms: %v\n",
		os.Args[0], slices.Sorted(maps.Keys(programs)))
	os.Exit(2)
}

// exitOn ends the process with the error, if there is one.
func exitOn(program string, err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", program, err)
		os.Exit(1)
	}
}
